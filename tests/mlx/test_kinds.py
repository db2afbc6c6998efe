"""Every kind of cache and weights: requests mixed in one batch are what they are alone."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.errors import RunnerError
from cadenza.events import Finished, PromptLogprobs, Token
from cadenza.request import Request, SamplingParams
from tests.by_day import by_day
from tests.mlx.tiny_models import KINDS, QUICK_KINDS, VOCAB_SIZE, Kind

LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=40,
    max_model_len=160,
    page_size=160,
    num_pages=4,
    max_num_queued_reqs=100,
)
LENGTHS = (5, 93, 1, 40, 64, 17, 130)
NUM_TOKENS = 5


@dataclass(frozen=True, slots=True)
class Loaded:
    runner: Any
    kind: Kind
    folder: Path

    def engine(self, *, caching: bool = False, **changes: Any) -> EngineCore:
        self.runner.reset()
        limits = replace(LIMITS, enable_prefix_caching=caching, slot_unit=self.kind.slot_unit)
        options = CoreOptions(eos_token_ids=frozenset())
        return EngineCore(self.runner, replace(limits, **changes), options)


def requests() -> list[Request]:
    rng = np.random.default_rng(3)
    prompts = [tuple(rng.integers(3, VOCAB_SIZE, length).tolist()) for length in LENGTHS]
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    drawn = replace(greedy, temperature=0.8, top_p=0.9, seed=5)
    return [
        Request(prompt_token_ids=prompt, params=drawn if index % 3 == 2 else greedy)
        for index, prompt in enumerate(prompts)
    ]


def streams(core: EngineCore, wanted: Iterable[Request], *, at_once: bool) -> list[Any]:
    """The tokens of each sample with their log probabilities, bit for bit; the requests are played
    together or one after the other."""
    found: dict[Any, list[Any]] = {}
    for request in wanted:
        core.submit(request)
        while not at_once and not core.is_idle:
            take(core, found)
    while not core.is_idle:
        take(core, found)
    return [found[key] for key in sorted(found)]


def take(core: EngineCore, found: dict[Any, list[Any]]) -> None:
    for event in core.step():
        if isinstance(event, Token):
            token = (event.token_id, event.logprobs)
            found.setdefault((event.request_id, event.sample), []).append(token)
        elif isinstance(event, PromptLogprobs):
            found.setdefault((event.request_id, 0), []).extend(event.entries)
        elif isinstance(event, Finished):
            assert event.error is None


def token_ids(stream: list[Any]) -> list[int]:
    return [token_id for token_id, _ in stream]


@pytest.fixture(scope="module", params=by_day(KINDS, QUICK_KINDS))
def loaded(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]) -> Iterator[Loaded]:
    from cadenza.backends.mlx.runner import MlxRunner

    setup = RunnerSetup(limits=LIMITS, device="cpu", ops="auto", dtype="float32", fill=1000.0)
    folder = tiny_model(request.param)
    with closing(MlxRunner(folder, VOCAB_SIZE, setup)) as made:
        made.warmup()
        yield Loaded(made, KINDS[request.param], folder)


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> list[Any]:
    return streams(loaded.engine(), requests(), at_once=False)


def test_rows_decode_together_where_the_models_code_allows_it(loaded: Loaded):
    assert loaded.runner.abilities.is_ragged == loaded.kind.is_ragged


def test_requests_in_one_batch_are_what_each_is_alone(loaded: Loaded, alone: list[Any]):
    together = streams(loaded.engine(), requests(), at_once=True)
    in_chunks = streams(loaded.engine(max_num_batched_tokens=9), requests(), at_once=True)
    assert [len(each) for each in alone] == [NUM_TOKENS] * len(LENGTHS)
    assert together == alone
    assert in_chunks == alone


def test_greedy_streams_are_those_of_mlx_lm(loaded: Loaded, alone: list[Any]):
    import mlx.core as mx

    from cadenza.backends.mlx.zoo import load_zoo_model

    zoo = load_zoo_model(loaded.folder)
    for request, stream in zip(requests(), alone, strict=True):
        if request.params.temperature:
            continue
        caches, tokens = zoo.new_caches(), list(request.prompt_token_ids)
        logits = zoo.model(mx.array([tokens]), cache=caches)
        chosen = [int(mx.argmax(logits[0, -1]))]
        for _ in range(NUM_TOKENS - 1):
            logits = zoo.model(mx.array([chosen[-1:]]), cache=caches)
            chosen.append(int(mx.argmax(logits[0, -1])))
        assert token_ids(stream) == chosen


def test_samples_of_one_prompt_are_what_each_is_alone(loaded: Loaded):
    prompt = requests()[1].prompt_token_ids
    params = SamplingParams(temperature=1.0, n=3, max_tokens=NUM_TOKENS, ignore_eos=True, seed=4)
    samples = Request(prompt_token_ids=prompt, params=params)
    together = streams(loaded.engine(), [samples], at_once=True)
    first = Request(prompt_token_ids=prompt, params=replace(params, n=1))
    assert together[0] == streams(loaded.engine(), [first], at_once=True)[0]
    assert len({tuple(token_ids(each)) for each in together}) == 3
    again = streams(loaded.engine(), [*requests(), samples], at_once=True)
    assert again[-3:] == together


def test_a_prompt_that_begins_like_another_takes_its_prefix_and_nothing_else_changes(
    loaded: Loaded, alone: list[Any]
):
    core = loaded.engine(caching=True)
    wanted = requests()
    first = streams(core, wanted, at_once=False)
    again = streams(core, wanted[-LIMITS.num_pages :], at_once=True)
    assert first == alone
    assert again == alone[-LIMITS.num_pages :]
    assert core.scheduler.prefix_counts.num_hits >= 64 + 64
    core.check_invariants()


def test_a_conversation_goes_on_from_its_slot(loaded: Loaded):
    """Prompt and answer of one request begin the prompt of the next; samples share it."""
    opening = requests()[1]
    core = loaded.engine(caching=True)
    (stream,) = streams(core, [opening], at_once=True)
    prompt = (*opening.prompt_token_ids, *token_ids(stream), 5, 6, 7)
    params = replace(opening.params, n=2, temperature=0.8, seed=3)
    follower = Request(prompt_token_ids=prompt, params=params)
    before = core.scheduler.prefix_counts.num_hits
    found = streams(core, [follower], at_once=True)
    num_hits = core.scheduler.prefix_counts.num_hits - before
    assert num_hits == (64 if loaded.kind.slot_unit > 1 else len(prompt) - 4)
    assert found == streams(loaded.engine(), [follower], at_once=True)


class FailsOnce:
    def __init__(self, runner: Any, at: int) -> None:
        self._runner = runner
        self._left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, inputs: Any) -> Any:
        self._left -= 1
        if not self._left:
            raise RunnerError("this step fails")
        return self._runner.launch(inputs)


def test_a_step_that_raises_changes_no_stream(loaded: Loaded, alone: list[Any]):
    """What the lost slots held is computed again, the generated tokens too."""
    core = replace(loaded, runner=FailsOnce(loaded.runner, 11)).engine(caching=True)
    assert streams(core, requests(), at_once=True) == alone
    assert core.loop.num_failed_steps == 1


def test_scored_prompts_are_what_each_is_alone(loaded: Loaded):
    """One of them has two samples, which part after its last token."""
    whole = requests()[1]
    scored = [
        replace(
            whole,
            prompt_token_ids=whole.prompt_token_ids[:length],
            params=replace(whole.params, prompt_logprobs=1, n=n, temperature=0.7, seed=6),
        )
        for length, n in ((5, 1), (30, 2))
    ]
    each_alone = streams(loaded.engine(), scored, at_once=False)
    small = loaded.engine(max_num_batched_tokens=11)
    together = streams(small, [*scored, requests()[3]], at_once=True)
    assert together[: len(each_alone)] == each_alone
    failing = replace(loaded, runner=FailsOnce(loaded.runner, 3)).engine()
    assert streams(failing, scored, at_once=True) == each_alone


def test_rows_that_join_and_leave_change_no_other_rows_buffers(loaded: Loaded):
    """Slot 0 decodes while slots 1 and 2 are filled, decode, are copied and are filled again."""
    import mlx.core as mx
    import numpy as np

    from cadenza.backends.mlx.probe import find_abilities
    from cadenza.backends.mlx.slot_model import SlotModel
    from cadenza.backends.mlx.slots import SlotSizes
    from cadenza.backends.mlx.zoo import load_zoo_model

    zoo = load_zoo_model(loaded.folder)
    model = SlotModel(zoo.model, zoo.new_caches(), SlotSizes(num_slots=3, capacity=96), (16, 64))
    model.abilities = find_abilities(zoo)

    def buffers(slot: int) -> list[bytes]:
        """Without the last position of keys and values [B, H, S, D], which is for padding."""
        own = [each[slot] for each in model.arrays()]
        cut = [each[:, :-1] if each.ndim == 3 and each.shape[1] == 96 else each for each in own]
        return [np.array(each).tobytes() for each in cut]

    def decode(*slots: int) -> None:
        positions = np.zeros(3, np.int32)
        for slot in slots:
            positions[slot], lengths[slot] = lengths[slot], lengths[slot] + 1
        ending = [slot for slot in slots if positions[slot] == filled[slot]]
        mx.eval(model.decode(mx.array([7, 8, 9]), positions, slots, ending))

    def fill(slot: int, count: int) -> None:
        model.extend(slot, 0, mx.arange(count) % VOCAB_SIZE)
        lengths[slot] = filled[slot] = count

    def fork() -> None:
        model.copy(1, 2, 40)
        lengths[2] = 40

    lengths, filled = [0, 0, 0], [0, 0, 0]
    fill(0, 30)
    decode(0)
    for event in (
        lambda: fill(1, 40),
        lambda: decode(1),
        fork,
        lambda: decode(1, 2),
        lambda: fill(1, 70),
        lambda: decode(1, 2),
    ):
        before = buffers(0)
        event()
        assert buffers(0) == before
        decode(0, 1)
        assert buffers(0) != before
