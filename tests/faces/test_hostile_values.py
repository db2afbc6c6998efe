"""Whatever is given to a public face in place of what belongs there: it is served, or refused by an
error of our own tree with a message; and numpy's whole numbers are whole numbers.
"""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza import LLM, AsyncEngine, EngineConfig, ReferenceEngine, Request, SamplingParams
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineLimits, config_from_options
from cadenza.engine.batch_engine import Emit
from cadenza.engine.front import EngineFront, InProcessLink
from cadenza.engine.process.messages import Start, Submit, decode_to_engine, encode
from cadenza.engine.request_check import RequestCheck
from cadenza.errors import CadenzaError, ConfigError, InvalidRequestError
from cadenza.loading.build import find_checkpoint, plan_model
from cadenza.verification.reference import build_reference

HOSTILE: dict[str, Any] = {
    "none": None,
    "true": True,
    "half": 0.5,
    "two": 2.0,
    "nan": math.nan,
    "inf": math.inf,
    "minus_one": -1,
    "million_bits": 1 << (1 << 20),
    "many_digits": [10**5000],
    "fraction": Fraction(1, 3),
    "complex": 1j,
    "empty_text": "",
    "text": "x",
    "surrogate": "\ud800",
    "nul": "\0",
    "long_text": "a/" * 5000,
    "bytes": b"x",
    "byte_array": bytearray(b"x"),
    "memory": memoryview(b"x"),
    "empty_list": [],
    "nothing_listed": [None],
    "nested": [[[1]]],
    "mixed": [1, "x"],
    "mapping": {},
    "mapping_of_number": {1: 1},
    "set": {1},
    "object": object(),
    "type": int,
    "function": len,
    "slice": slice(1),
    "numpy_nan": np.float64(math.nan),
    "numpy_half": np.float32(0.5),
    "numpy_true": np.True_,
    "numpy_whole": np.int64(3),
    "numpy_minus": np.int8(-1),
    "numpy_text": np.str_("x"),
    "numpy_bytes": np.array(b"x"),
    "array": np.array([1, 2]),
    "array_of_one": np.array(5),
    "array_of_floats": np.array([1.0, 2.0]),
    "array_of_bools": np.array([True]),
    "array_of_texts": np.array(["a"]),
    "array_of_objects": np.array([None, 1], object),
    "array_of_arrays": np.array([[1, 2], [3, 4]]),
    "empty_array": np.array([]),
    "array_type": np.ndarray,
}
CHECK = RequestCheck(
    limits=EngineLimits(
        max_num_seqs=4,
        max_num_batched_tokens=4,
        max_model_len=256,
        page_size=16,
        num_pages=16,
        max_num_queued_reqs=4,
    ),
    vocab_size=331,
    backend="test",
    capabilities=frozenset({"logprobs", "drafts"}),
)
WHOLE = {"max_tokens": 5, "top_k": 3, "seed": 7, "n": 2, "logprobs": 1, "min_tokens": 2}

TIMEOUT_S = 600.0

Call = Callable[[Any], object]


@pytest.fixture(scope="module")
def bundled() -> Checkpoint:
    return open_checkpoint(None)


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> ReferenceEngine:
    return build_reference(find_checkpoint(tiny_folder), EngineConfig(), max_model_len=256)


def outcome(call: Call, value: Any) -> Any:
    """What it gives; None where it is refused. Raises what no caller should see."""
    try:
        return call(value)
    except CadenzaError as refusal:
        message = str(refusal)
        assert message
        assert len(message) < 2000
        return None


def each_hostile(*places: str) -> Iterator[tuple[str, Any]]:
    """Each value in each place; a failure shows which."""
    for place in places:
        for name, value in HOSTILE.items():
            print(f"{name} as {place}")
            yield place, value


def names_of(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def check_submitted(request: Request) -> None:
    """It is refused, or arrives in the engine process as it is."""
    if outcome(lambda each: CHECK.check(each) or each, request) is not None:
        assert decode_to_engine(encode(Submit(3, request))[4:]) == Submit(3, request)
        assert isinstance(hash(request), int)


def test_any_sampling_option_is_refused_or_reaches_the_engine_process():
    for name, value in each_hostile(*names_of(SamplingParams)):
        params = outcome(
            lambda given, name=name: SamplingParams(**{"max_tokens": None, name: given}), value
        )
        if params is not None:
            check_submitted(Request(prompt_token_ids=(1,), params=params))


def test_any_field_of_a_request_is_refused_or_reaches_the_engine_process():
    for name, value in each_hostile(*names_of(Request)):
        request = outcome(
            lambda given, name=name: Request(**{"prompt_token_ids": (1,), name: given}), value
        )
        if request is not None:
            check_submitted(request)


def test_any_option_of_the_engine_is_refused_or_planned(bundled: Checkpoint):
    for name, value in each_hostile(*names_of(EngineConfig)):
        config = outcome(lambda given, name=name: config_from_options({name: given}), value)
        if config is not None:
            start = Start(model=None, config=config, log_level=0)
            assert decode_to_engine(encode(start)[4:]) == start
            outcome(lambda each: plan_model(bundled, each), config)


MODELS: dict[str, Call] = {
    "LLM": lambda value: LLM(value) if value is not None else None,
    "from_model": lambda value: AsyncEngine.from_model(value) if value is not None else None,
}


def test_any_model_is_refused():
    for face, value in each_hostile(*MODELS):
        assert outcome(MODELS[face], value) is None


MESSAGE = {"role": "user", "content": "a"}
SHORT = {"max_tokens": 2}
OF_LLM: dict[str, Callable[[LLM], Call]] = {
    "prompts": lambda llm: lambda value: llm.generate(value, SHORT),
    "prompt": lambda llm: lambda value: llm.generate([value, [1]], SHORT),
    "params": lambda llm: lambda value: llm.generate([1], value),
    "params_listed": lambda llm: lambda value: llm.generate([1], [value]),
    "an_option": lambda llm: lambda value: llm.generate([1], {**SHORT, "min_tokens": value}),
    "kind": lambda llm: lambda value: [*llm.stream([1], SHORT, kind=value)],
    "messages": lambda llm: lambda value: llm.chat(value, SHORT),
    "conversation": lambda llm: lambda value: llm.chat([value, [MESSAGE]], SHORT),
    "message": lambda llm: lambda value: llm.chat([[MESSAGE, value]], SHORT),
    "content": lambda llm: lambda value: llm.chat([{**MESSAGE, "content": value}], SHORT),
    "tools": lambda llm: lambda value: llm.chat([MESSAGE], SHORT, tools=value),
    "template": lambda llm: lambda value: llm.chat([MESSAGE], SHORT, chat_template_kwargs=value),
    "stream_chat": lambda llm: lambda value: [*llm.stream_chat(value, SHORT)],
    "default_params": lambda llm: lambda value: llm.default_params(n=value),
    "submit": lambda llm: llm.core.submit,
    "check": lambda llm: llm.core.check,
}


def test_anything_given_to_an_llm_is_refused_or_served(worded: LLM):
    for place, value in each_hostile(*OF_LLM):
        outcome(OF_LLM[place](worded), value)
        assert worded.core.is_idle


class StillService(EngineFront):
    """Accepts requests, and computes nothing."""

    def serve(self, emit: Emit) -> None:
        self.may_end.wait(TIMEOUT_S)

    may_end = threading.Event()


@pytest.fixture(scope="module")
def served(worded: LLM) -> Iterator[Callable[[Callable[[AsyncEngine], Call], Any], object]]:
    """Asks an `AsyncEngine` over the core of `worded`, which is not served meanwhile."""
    still = StillService(InProcessLink(worded.core))
    engine = AsyncEngine(still, worded._loaded.text)

    def ask(make: Callable[[AsyncEngine], Call], value: Any) -> object:
        async def run() -> object:
            found: Any = outcome(make(engine), value)
            return outcome(lambda _: None, found) if found is None else await first(found)

        return asyncio.run(run())

    yield ask
    still.may_end.set()


async def first(stream: Any) -> object:
    """What the stream's request is refused with, or None where it was submitted."""
    if not hasattr(stream, "asend"):
        stream.close()
        return None
    waiting = asyncio.ensure_future(stream.asend(None))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    if not done:
        waiting.cancel()
        return None
    error = waiting.exception()
    assert isinstance(error, CadenzaError)
    return error


OF_ASYNC: dict[str, Callable[[AsyncEngine], Call]] = {
    "generate": lambda engine: engine.generate,
    "params": lambda engine: lambda value: engine.generate([1], value),
    "params_of_a_request": lambda engine: (
        lambda value: engine.generate(Request(prompt_token_ids=(1,)), value)
    ),
    "kind": lambda engine: lambda value: engine.generate([1], kind=value),
    "submit": lambda engine: engine.submit,
}


def test_anything_given_to_an_async_engine_is_refused_or_submitted(
    served: Callable[[Callable[[AsyncEngine], Call], Any], object],
):
    for place, value in each_hostile(*OF_ASYNC):
        served(OF_ASYNC[place], value)


GREEDY = Request(prompt_token_ids=(1, 2), params=SamplingParams(max_tokens=1, temperature=0.0))
OF_REFERENCE: dict[str, Callable[[ReferenceEngine], Call]] = {
    "run": lambda engine: engine.run,
    "seed": lambda engine: lambda value: engine.run(GREEDY, seed=value),
    "sample": lambda engine: lambda value: engine.run(GREEDY, sample=value),
    "score": lambda engine: engine.score,
}


def test_anything_given_to_the_reference_is_refused_or_served(reference: ReferenceEngine):
    for place, value in each_hostile(*OF_REFERENCE):
        outcome(OF_REFERENCE[place](reference), value)


def test_the_reference_refuses_what_the_engine_refuses(reference: ReferenceEngine):
    for ids, max_tokens in (((331,), 1), ((), 1), ((1,) * 256, 1), ((1,), 256)):
        with pytest.raises(InvalidRequestError):
            reference.run(
                Request(prompt_token_ids=ids, params=SamplingParams(max_tokens=max_tokens))
            )
    for scored in ((331,), (-1,), (1,) * 257):
        with pytest.raises(InvalidRequestError):
            reference.score(scored)
    assert len(reference.score((1,) * 256)) == 255


@pytest.mark.parametrize("kind", [np.int64, np.int8, np.uint16])
def test_numpys_whole_numbers_are_pythons(llm: LLM, kind: Any):
    params = {"temperature": np.float32(0.0), "ignore_eos": True, "max_tokens": kind(4)}
    plain = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4}
    expected = [output.outputs for output in llm.generate([[1, 2], [3, 4]], plain)]
    for prompts in (
        np.array([[1, 2], [3, 4]], kind),
        [np.array([1, 2], kind), (kind(3), 4)],
        iter([[kind(1), kind(2)], np.array([3, 4], kind)]),
    ):
        assert [output.outputs for output in llm.generate(prompts, params)] == expected  # type: ignore[arg-type]
    (one,) = llm.generate(np.array([1, 2], kind), params)  # type: ignore[arg-type]
    assert one.outputs == expected[0]
    assert set(map(type, one.prompt_token_ids)) == {int}
    assert EngineConfig(max_num_seqs=kind(3)) == EngineConfig(max_num_seqs=3)


def test_numpys_whole_numbers_are_kept_as_pythons():
    for name, number in WHOLE.items():
        kept = getattr(SamplingParams(**{name: np.int64(number)}), name)  # type: ignore[arg-type]
        assert (kept, type(kept)) == (number, int)


MIXED: tuple[Any, ...] = ([7, [1, 2]], [[1, 2], 7, [3]], [7, "a"], ["a", 7], [np.int64(7), [1]])


def test_prompts_mixed_with_token_ids_are_refused_and_nothing_is_left_out(worded: LLM):
    for prompts in MIXED:
        with pytest.raises(InvalidRequestError, match=r"mix token ids with .* a list of its own"):
            worded.generate(prompts, SHORT)


def test_messages_mixed_with_conversations_are_refused_and_nothing_is_left_out(worded: LLM):
    for messages in ([MESSAGE, [MESSAGE]], [[MESSAGE], MESSAGE], [MESSAGE, "a"]):
        with pytest.raises(InvalidRequestError, match="mix messages with"):
            worded.chat(messages, SHORT)  # type: ignore[arg-type]


def test_prompts_of_an_iterator_are_all_answered(worded: LLM):
    assert len(worded.generate((text for text in ("a", "b", "c")), SHORT)) == 3  # type: ignore[arg-type]


def test_a_request_keeps_nothing_of_the_callers_lists():
    ids, words, stops = [1, 2], [[3]], ["a"]
    request = Request(
        prompt_token_ids=ids,  # type: ignore[arg-type]
        bad_word_token_ids=words,  # type: ignore[arg-type]
        params=SamplingParams(stop=stops),
    )
    for kept in (ids, words[0], stops):
        kept.append(-200)  # type: ignore[arg-type]
    assert request.prompt_token_ids == (1, 2)
    assert request.bad_word_token_ids == ((3,),)
    assert request.params.stop == ("a",)


def test_an_unknown_option_of_a_streamed_chat_is_an_error(worded: LLM):
    with pytest.raises(TypeError, match="tool"):
        worded.stream_chat([MESSAGE], SHORT, tool=[])  # type: ignore[call-arg]


def test_a_switch_of_the_engine_is_true_or_false():
    for value in ("no", 0, None):
        with pytest.raises(ConfigError, match="--enable-prefix-caching"):
            EngineConfig(enable_prefix_caching=value)  # type: ignore[arg-type]
