"""What the tests of stored pages share: an engine over the fake runner and a folder."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from cadenza.backends.fake import FakeRunner
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.page_folder import PageFolder
from cadenza.events import Finished, Token
from cadenza.request import Request, SamplingParams
from tests.scheduler.builders import prompt_of

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=256,
    page_size=16,
    num_pages=64,
    max_num_queued_reqs=50,
)
FINGERPRINT = "a model"
MAX_BYTES = 1 << 20
PROMPT = prompt_of(100, seed=7)
"""Six full pages."""


def folder_of(folder: Path, fingerprint: str = FINGERPRINT) -> PageFolder:
    return PageFolder(folder, fingerprint, MAX_BYTES)


def runner_of(limits: EngineLimits, kind: type[FakeRunner] = FakeRunner) -> FakeRunner:
    return kind(
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_pages_per_seq=limits.max_pages_per_seq,
        num_pages=limits.num_pages,
        page_size=limits.page_size,
        num_state_slots=limits.num_state_slots,
    )


def engine_of(
    pages: PageFolder | None,
    limits: EngineLimits = LIMITS,
    options: CoreOptions | None = None,
) -> EngineCore:
    return EngineCore(
        runner_of(limits), limits, replace(options or CoreOptions(), page_folder=pages)
    )


def request_of(prompt: Sequence[int] = PROMPT, *, n: int = 1, salt: str = "") -> Request:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True, n=n, logprobs=1)
    return Request(prompt_token_ids=tuple(prompt), params=params, cache_salt=salt)


@dataclass(slots=True)
class Streams:
    """The tokens with their log probabilities by request and sample, and the cached tokens."""

    tokens: dict[tuple[int, int], list[tuple[int, float | None]]] = field(default_factory=dict)
    cached: dict[tuple[int, int], int] = field(default_factory=dict)


def run(engine: EngineCore, requests: Sequence[Request], *, num_steps: int = 5000) -> Streams:
    """Submits all requests at once and steps until the engine is idle."""
    found = Streams()
    for request in requests:
        engine.submit(request)
    for _ in range(num_steps):
        if engine.is_idle:
            break
        for event in engine.step():
            if isinstance(event, Token):
                sample = (event.request_id, event.sample)
                logprob = None if event.logprobs is None else event.logprobs.logprob
                found.tokens.setdefault(sample, []).append((event.token_id, logprob))
            elif isinstance(event, Finished):
                assert event.finish_reason != "error", event
                found.cached[event.request_id, event.sample] = event.num_cached_tokens
        engine.check_invariants()
        assert not engine.loop.num_empty_steps, "nothing was computed, although there is work"
    assert engine.is_idle, "the engine does not come to rest"
    return found


def ran_once(folder: Path, requests: Sequence[Request], fingerprint: str = FINGERPRINT) -> Streams:
    """In an engine that is then closed."""
    engine = engine_of(folder_of(folder, fingerprint))
    found = run(engine, requests)
    engine.close()
    return found


def files_of(folder: Path) -> list[Path]:
    """The stored pages."""
    return sorted(folder.glob("*/??/*"))
