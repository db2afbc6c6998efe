"""Records the streams of every family's tiny model, bit for bit, and compares with a recording.

    python tools/record_bits.py before.json           # on the commit before a change
    python tools/record_bits.py before.json --compare # after it; exit status 1 on any difference

Owns the requests: seeded, with every sampling option, on both op tables, with chunked prompts,
prefix-cache hits and preemption. Invariant: a recording depends only on the engine's arithmetic and
the machine's instruction set, so that two recordings on one machine differ only if a change altered
bits.
"""

import argparse
import hashlib
import json
import random
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from rich.progress import track

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import (
    read_shape,
    text_shape_names,
    write_random_checkpoint,
)
from cadenza.config import EngineConfig
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.events import Finished, PromptLogprobs, Started, Token, TokenLogprobs
from cadenza.loading.build import plan_model
from cadenza.loading.planned_engine import PlannedEngine
from cadenza.request import Request, SamplingParams

NUM_REQUESTS = 24
NUM_ROWS = 6
MAX_TOKENS = 24
SHARED_PREFIX = 40
SHORT_PROMPT, LONG_PROMPT = 56, 700
TIGHT_PAGES = 12  # pages of 16 tokens: enough for two or three short streams of the six rows

Digests = dict[str, str]  # a digest for each sample, by "round/request/sample"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one op table."""

    shape: str
    ops: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.shape} {self.ops} {self.dtype}"


def all_cases() -> Iterator[Case]:
    """Every tiny shape on the native table in float32 and bfloat16, and on the reference table."""
    for shape in text_shape_names():
        if shape.startswith("tiny-"):
            yield Case(shape=shape, ops="native", dtype="float32")
            yield Case(shape=shape, ops="native", dtype="bfloat16")
            yield Case(shape=shape, ops="reference", dtype="float32")


def record(case: Case) -> Digests:
    """Runs a case's requests twice in a large pool, then in a pool that forces preemption."""
    with tempfile.TemporaryDirectory(prefix="cadenza-bits-") as folder:
        named = read_shape(case.shape)
        shape = named.config
        write_random_checkpoint(named, Path(folder), seed=7, dtype="float32")
        checkpoint = open_checkpoint(Path(folder))
        longest = LONG_PROMPT if case.ops == "native" else SHORT_PROMPT
        context = min(longest + MAX_TOKENS, shape.max_position_embeddings)
        config = EngineConfig(
            ops=case.ops,  # pyright: ignore[reportArgumentType]
            dtype=case.dtype,  # pyright: ignore[reportArgumentType]
            max_num_seqs=NUM_ROWS,
            max_model_len=context,
            max_num_batched_tokens=48 if case.ops == "native" else 32,
            max_num_queued_reqs=4 * NUM_REQUESTS,
            num_pages=NUM_ROWS * -(-context // 16),
        )
        plan = plan_model(checkpoint, config)
        engine = PlannedEngine(checkpoint=checkpoint, plan=plan, config=config)
        with closing(engine.load_warm_runner(fill=float("nan"))) as runner:
            short, long = make_requests(vocab_size=shape.vocab_size, context=context), []
            if case.ops == "native":
                long = [replace(short[0], prompt_token_ids=_long_prompt(shape.vocab_size, context))]
            roomy = EngineCore(runner, plan.limits, _options(checkpoint, "overlap"))
            digests = _play(roomy, [*long, *short], "cold")
            digests |= _play(roomy, [*long, *short], "hot")
            runner.reset()
            limits = replace(plan.limits, num_pages=TIGHT_PAGES, max_model_len=_tight_context())
            tight = EngineCore(runner, limits, _options(checkpoint, "plain"))
            digests |= _play(tight, short, "tight")
            _require_shown(roomy, tight)
    return digests


def compare(before: dict[str, Digests], after: dict[str, Digests]) -> list[str]:
    """The names of streams that differ or occur in only one of the recordings."""
    return [
        f"{case}: {stream}"
        for case in sorted(before.keys() | after.keys())
        for stream in sorted(before.get(case, {}).keys() | after.get(case, {}).keys())
        if before.get(case, {}).get(stream) != after.get(case, {}).get(stream)
    ]


def make_requests(*, vocab_size: int, context: int) -> list[Request]:
    """Requests with every option that reaches the engine; about half have a shared prefix."""
    rng = random.Random(5)  # noqa: S311  a workload, not a secret
    longest = min(SHORT_PROMPT, context - MAX_TOKENS)
    prefix = [rng.randrange(vocab_size) for _ in range(min(SHARED_PREFIX, longest - 1))]
    return [_request(rng, vocab_size, prefix, longest) for _ in range(NUM_REQUESTS)]


def _options(checkpoint: Checkpoint, loop: str) -> CoreOptions:
    return CoreOptions(
        eos_token_ids=frozenset(checkpoint.eos_token_ids),
        loop=loop,  # pyright: ignore[reportArgumentType]
        reserved_output=0.5 if loop == "overlap" else 0.0,
        seed=11,
        secret=b"recorded",
    )


def _tight_context() -> int:
    return TIGHT_PAGES * 16


def _require_shown(roomy: EngineCore, tight: EngineCore) -> None:
    if not roomy.scheduler.prefix_counts.num_hits:
        raise SystemExit("no prefix-cache hit occurred; change the requests so that one does")
    if not tight.scheduler.num_preemptions:
        raise SystemExit("no sequence was preempted; lower TIGHT_PAGES")


def _play(core: EngineCore, requests: Iterable[Request], round_name: str) -> Digests:
    """Submits two requests before each step and runs all of them to their end."""
    coming = list(requests)
    hashes: dict[tuple[int, int], hashlib.blake2b] = {}
    first_id: int | None = None
    while coming or not core.is_idle:
        for request in coming[:2]:
            request_id = core.submit(request)
            first_id = request_id if first_id is None else first_id
            for sample in range(request.params.n):
                hashes[request_id - first_id, sample] = hashlib.blake2b(digest_size=12)
        del coming[:2]
        for event in core.step():
            assert first_id is not None
            if isinstance(event, Started):
                continue
            sample = 0 if isinstance(event, PromptLogprobs) else event.sample
            hashes[event.request_id - first_id, sample].update(_bytes_of(event))
    return {
        f"{round_name}/{request}/{sample}": digest.hexdigest()
        for (request, sample), digest in hashes.items()
    }


def _bytes_of(event: Token | PromptLogprobs | Finished) -> bytes:
    """An event's content without `num_cached_tokens`, which depends on arrival times."""
    if isinstance(event, Finished):
        end = (event.finish_reason, event.stop_token_id, event.num_generated_tokens, event.error)
        return repr(end).encode()
    if isinstance(event, PromptLogprobs):
        return b"".join(_logprob_bytes(entry) for entry in event.entries)
    found = b"" if event.logprobs is None else _logprob_bytes(event.logprobs)
    return struct.pack("<q", event.token_id) + found


def _logprob_bytes(entry: TokenLogprobs) -> bytes:
    count = len(entry.top_ids)
    return struct.pack(
        f"<fq{count}q{count}f", entry.logprob, entry.rank, *entry.top_ids, *entry.top_logprobs
    )


def _long_prompt(vocab_size: int, context: int) -> tuple[int, ...]:
    rng = random.Random(3)  # noqa: S311  a workload, not a secret
    return tuple(rng.randrange(vocab_size) for _ in range(context - MAX_TOKENS))


def _request(rng: random.Random, vocab_size: int, prefix: list[int], longest: int) -> Request:
    length = rng.choice((rng.randint(1, 12), rng.randint(1, longest), longest))
    prompt = prefix[: rng.choice((0, len(prefix)))][:length]
    prompt += [rng.randrange(vocab_size) for _ in range(length - len(prompt))]
    tokens = rng.sample(range(vocab_size), 12)
    min_tokens = rng.choice((0, 0, 5))
    params = SamplingParams(
        max_tokens=rng.randint(6, MAX_TOKENS),
        min_tokens=min_tokens,
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0, 1.3)),
        top_k=rng.choice((0, 0, 5, 40)),
        top_p=rng.choice((1.0, 1.0, 0.6, 0.95)),
        min_p=rng.choice((0.0, 0.0, 0.05)),
        top_n_sigma=rng.choice((0.0, 0.0, 1.0)),
        seed=rng.choice((None, rng.randrange(1 << 40))),
        presence_penalty=rng.choice((0.0, 0.0, 1.1)),
        frequency_penalty=rng.choice((0.0, 0.0, -0.4)),
        repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
        logit_bias=rng.choice(({}, {tokens[0]: 3.0, tokens[1]: -4.0})),
        allowed_token_ids=rng.choice((None, None, None, sorted(tokens))),
        n=rng.choice((1, 1, 1, 2, 3)),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.choice(((), tuple(tokens[2:4]))),
        logprobs=rng.choice((None, 0, 5)),
        prompt_logprobs=rng.choice((None, None, 3)),
    )
    bad_words = rng.choice(((), ((tokens[4],), (tokens[5], tokens[6]))))
    return Request(
        prompt_token_ids=tuple(prompt),
        params=params,
        bad_word_token_ids=bad_words,
        cache_salt=rng.choice(("", "", "other")),
    )


def main() -> int:
    """Returns the exit status: 1 if a comparison found a difference."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="the recording, written or compared with")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    cases = [case for case in all_cases() if options.only in case.name]
    found = {case.name: record(case) for case in track(cases, description="playing")}
    if not options.compare:
        options.file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"recorded {sum(map(len, found.values()))} streams of {len(found)} cases")
        return 0
    recorded = cast(dict[str, Digests], json.loads(options.file.read_text(encoding="utf-8")))
    before = {name: case for name, case in recorded.items() if options.only in name}
    differences = compare(before, found)
    for difference in differences:
        print(difference)
    print(
        f"{sum(map(len, found.values()))} streams of {len(found)} cases compared, "
        f"{len(differences)} differ"
    )
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
