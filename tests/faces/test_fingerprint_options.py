"""Each option of an engine, a number by the least that it can change: either it changes the
fingerprint, or no bit of an answer."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import structs

from cadenza import LLM, EngineConfig
from cadenza.backends.base import RunnerSetup
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.generation_defaults import GENERATION_FILE
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.answers import AnswerParsers, AskedAnswer, ToolUse
from cadenza.frontend.prepared_request import ChatPrompt
from cadenza.frontend.sparse_prompts import SparsePrompts
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.loading.build import open_planned
from cadenza.request import Request, SamplingParams
from cadenza.sparse_prefill import SpecPrefillChoice, SpecPrefillConfig, When
from cadenza.structured import JsonStyle, StructuredOutput
from cadenza.text.answers.part_parser import REASONING_FORMATS
from cadenza.text.answers.tool_calls import TOOL_FORMATS
from cadenza.text.answers.tool_format import Tool
from cadenza.text.schemas.grammar import name_forms
from tests.cli.harness import write_model
from tests.engine.test_sparse_prompts import SparseStub, config_of

SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "max_num_batched_tokens": 64}
SHOUT = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
OTHERS: dict[str, tuple[Any, ...]] = {
    "ops": ("reference",),
    "tensor_parallel_size": (1,),
    "dtype": ("bfloat16",),
    "quantization": ("int8", "int4"),
    "weight_cache_bytes": (0,),
    "kv_cache_dtype": ("int8",),
    "arithmetic": ("portable",),
    "max_model_len": (255,),
    "max_num_seqs": (5,),
    "max_num_batched_tokens": (63,),
    "num_pages": (65,),
    "scheduler_headroom_gb": (math.nextafter(0.0, 1.0),),
    "kv_layout": ("paged",),
    "page_size": (32,),
    "enable_prefix_caching": (False,),
    "prefix_cache_memory_share": (math.nextafter(1.0, 0.0),),
    "max_state_snapshots": (1,),
    "state_snapshot_interval": (513,),
    "images": (False,),
    "image_cache_bytes": (1 << 20,),
    "image_max_tokens": (4095,),
    "scheduler": ("plain",),
    "max_num_queued_reqs": (9,),
    "max_num_queued_tokens": (900,),
    "max_consecutive_step_errors": (11,),
    "max_itl_ms": (math.nextafter(50.0, 51.0),),
    "batching": ("static",),
    "scheduling_policy": ("shortest_first",),
    "starvation_guard": (math.nextafter(10.0, 11.0),),
    "admission": ("conservative",),
    "seed": (1,),
    "generation_config": ("none",),
    "chat_template": (SHOUT, "none"),
    "speculative_config": ({"method": "ngram"},),
}
"""Of each option, values beside its own."""

ELSEWHERE = {
    "backend": "other ones have other arithmetic, by its name",
    "device": "as the backend",
    "revision": "another checkpoint",
    "mmproj": "another checkpoint",
    "kv_cache_memory_bytes": "num_pages by another name",
    "gpu_memory_utilization": "num_pages by another name",
    "prefix_cache_disk": "a page is one that the engine could have computed: tests/engine",
    "prefix_cache_disk_bytes": "as the folder",
    "spec_prefill": "below",
}

DECIDES_PAGES = ("checkpoint", "arithmetic", "activations", "weights", "kv", "max_model_len")
"""Parts of the fingerprint of an answer that decide the bits of a page, too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with a tokenizer, and recommended sampling."""
    found = write_model(tmp_path_factory.mktemp("models") / "worded")
    (found / GENERATION_FILE).write_text('{"temperature": 0.7}')
    return found


def fingerprints_of(folder: Path, **options: Any) -> tuple[Fingerprint, str]:
    """Those of answers, and of pages."""
    identity = open_planned(folder, EngineConfig(**{**SMALL, **options})).identity()
    return identity.fingerprint, identity.digest("pages")


def answers_of(folder: Path, **options: Any) -> list[Any]:
    """To requests that leave their sampling, but for the seed, and their length to the engine."""
    with LLM(folder, **{**SMALL, **options}) as llm:
        params = [{"seed": seed, "logprobs": 2, "ignore_eos": True} for seed in (1, 2)]
        asked = [[{"role": "user", "content": "the fox " * count}] for count in (3, 30)]
        found = llm.chat(asked, params)
        return [(each.prompt_token_ids, each.outputs[0].logprobs) for each in found]


def test_every_option_is_tried():
    assert {*OTHERS, *ELSEWHERE} == {each.name for each in fields(EngineConfig)}


@pytest.mark.native
def test_an_option_changes_the_fingerprint_or_no_answer(folder: Path):
    own, pages = fingerprints_of(folder)
    kept: dict[str, Any] = {}
    for name, values in OTHERS.items():
        for value in values:
            other, other_pages = fingerprints_of(folder, **{name: value})
            if other.digest == own.digest:
                kept[name] = value
            if any(getattr(own, part) != getattr(other, part) for part in DECIDES_PAGES):
                assert other_pages != pages, name
    decides = {"dtype", "quantization", "kv_cache_dtype", "ops", "generation_config"}
    assert not decides & set(kept), "the control: options that decide something"
    assert {"scheduler", "page_size", "seed", "starvation_guard"} <= set(kept)
    assert answers_of(folder, **kept) == answers_of(folder)


def test_recommended_numbers_are_in_the_fingerprint_to_the_last_bit(folder: Path):
    own, _ = fingerprints_of(folder)
    for name, value in (("temperature", 0.7), ("top_p", 0.9), ("min_p", 0.05)):
        digests = {own.digest}
        for number in (value, math.nextafter(value, 1.0)):
            (folder / GENERATION_FILE).write_text(f'{{"{name}": {number!r}}}')
            digests.add(fingerprints_of(folder)[0].digest)
        assert len(digests) == 3 - (name == "temperature"), name
    (folder / GENERATION_FILE).write_text('{"temperature": 0.7}')


SPARSE = SpecPrefillConfig(keep=0.5, threshold=300, head=64)
OTHER_SPARSE: dict[str, tuple[Any, ...]] = {
    "keep": (math.nextafter(0.5, 0.0), math.nextafter(0.5, 1.0), 0.5000001),
    "threshold": (299, 301),
    "head": (63, 65),
    "when": get_args(When),
    "allow_request": (False,),
    "force": (True,),
}
"""Of each setting of sparse prefill, values beside `SPARSE`'s. The model and its quantization are
those of the scorer, below."""


def thinned(text: TextFrontend, config: SpecPrefillConfig, asked: dict[str, Any]) -> list[Request]:
    """A conversation, and prompts of a few lengths around the threshold."""
    text.sparse = SparsePrompts(config=config)
    params = SamplingParams(spec_prefill=asked or None)
    talk = [
        {"role": "system", "content": "You answer about the text. " * 20},
        {"role": "user", "content": "It was a long day in the harbour. " * 60},
        {"role": "user", "content": "What was the day like?"},
    ]
    found = [text.prepare(ChatPrompt(messages=talk), params).request]
    for length in (299, 300, 320, 640):
        found.append(text.prepare([7] * length, params).request)
    return found


def kept_of(request: Request) -> Any:
    """What decides which chunks are kept, besides the scores."""
    sparse, num_tokens = request.sparse_prefill, len(request.prompt_token_ids)
    if sparse is None:
        return None
    forced = sorted(sparse.forced_chunks(num_tokens))
    return sparse.num_kept_chunks(num_tokens), forced, sparse.when, sparse.cold_from


def test_every_setting_of_sparse_prefill_is_tried():
    own = {each.name for each in fields(SpecPrefillConfig)}
    assert own == {*OTHER_SPARSE, "model", "quantization"}


WHOLE = Fingerprint(
    checkpoint="c",
    arithmetic="a",
    activations="bfloat16",
    weights="bfloat16",
    kv="bfloat16",
    max_model_len=4096,
    tokenizer="t",
    template="",
    defaults="d",
    scorer="s",
)


@pytest.mark.parametrize("name", OTHER_SPARSE)
@pytest.mark.parametrize("is_asked", [False, True], ids=["server", "request"])
def test_a_setting_of_sparse_prefill_changes_the_fingerprint_or_no_kept_chunk(
    name: str, is_asked: bool
):
    if is_asked and name not in {each.name for each in fields(SpecPrefillChoice)}:
        return
    text = TextFrontend(open_checkpoint(None), max_model_len=4096)

    def told(**changes: Any) -> list[tuple[Any, str]]:
        config = SPARSE if is_asked else replace(SPARSE, **changes)
        requests = thinned(text, config, changes if is_asked else {})
        digests = (text.sparse.fingerprint_of(each, WHOLE).digest for each in requests)
        return [*zip(map(kept_of, requests), digests, strict=True)]

    own, num_changed = told(), 0
    for value in OTHER_SPARSE[name]:
        for (kept, digest), (other, other_digest) in zip(own, told(**{name: value}), strict=True):
            assert kept == other or digest != other_digest, (name, value)
            num_changed += kept != other
    assert num_changed or name in ("allow_request", "force"), "the control"


HERE = "tests.faces.test_fingerprint_options"


class NamedArithmetic(SparseStub):
    """The model that scores prompts has another class of arithmetic than the model."""

    scorer_class = "one"

    def name_arithmetic(self, checkpoint: Checkpoint, setup: RunnerSetup) -> str:
        return self.scorer_class if "scores" in setup.capabilities else "portable"


class OtherArithmetic(NamedArithmetic):
    scorer_class = "two"


def test_the_scorers_arithmetic_and_types_are_in_the_fingerprint_of_thinned_answers():
    found = [
        open_planned(None, config_of(), {"stub": f"{HERE}:{kind}"}).identity().fingerprint
        for kind in ("NamedArithmetic", "NamedArithmetic", "OtherArithmetic")
    ]
    assert found[0] == found[1]
    assert structs.replace(found[0], scorer="") == structs.replace(found[2], scorer="")
    assert found[0].digest == found[2].digest, "of whole prompts the scorer decides nothing"
    assert found[0].pruned("x").digest == found[1].pruned("x").digest
    assert found[0].pruned("x").digest != found[2].pruned("x").digest


BLANK = Fingerprint(
    checkpoint="",
    arithmetic="",
    activations="",
    weights="",
    kv="",
    max_model_len=1,
    tokenizer="",
    template="",
    defaults="",
)
ASKED = [
    {"role": "system", "content": "Date: 2026-01-02\nBe brief."},
    {"role": "user", "content": "x"},
]
FREE_TEXT = StructuredOutput(json={"type": "string"})
CALLED = ToolUse(tools=(Tool(name="f"),), choice="required")
OTHER_ANSWERS: dict[str, tuple[Any, ...]] = {
    "reasoning": ("none", *REASONING_FORMATS),
    "tool_calls": (*TOOL_FORMATS,),
    "max_string": (10, None, 4096),
    "strict_tools": (True,),
    "strict_messages": (True,),
    "stable_prompts": (True,),
}
"""Of each option, the values beside its default."""


def answers(parsers: AnswerParsers) -> tuple[Request, ...]:
    """What decides the tokens of some answers: their prompts and their constraints."""
    text = TextFrontend(open_checkpoint(None), parsers=parsers)
    asked = (
        (SamplingParams(), AskedAnswer(use=CALLED)),
        (SamplingParams(structured=FREE_TEXT), AskedAnswer()),
        (SamplingParams(structured=FREE_TEXT), AskedAnswer(use=replace(CALLED, choice="auto"))),
        (SamplingParams(), AskedAnswer(use=replace(CALLED, choice="auto"))),
    )
    return tuple(
        text.prepare(ChatPrompt(messages=ASKED, asked=how), params).request for params, how in asked
    )


def forms_of(parsers: AnswerParsers) -> str:
    text = TextFrontend(open_checkpoint(None), parsers=parsers)
    return text.with_forms(BLANK).digest


def test_every_option_of_answers_is_tried():
    assert OTHER_ANSWERS.keys() == {each.name for each in fields(AnswerParsers)}


@pytest.mark.parametrize("name", OTHER_ANSWERS)
def test_an_option_of_answers_changes_their_fingerprint_or_none(name: str):
    usual = AnswerParsers()
    before, digest = answers(usual), forms_of(usual)
    num_changed = 0
    for value in OTHER_ANSWERS[name]:
        parsers = replace(usual, **{name: value})
        is_changed = answers(parsers) != before
        assert not is_changed or forms_of(parsers) != digest, value
        num_changed += is_changed
    assert num_changed or name.startswith("strict_"), (
        "the control: an option that decides something"
    )


def test_the_librarys_version_and_the_limits_are_in_the_fingerprint():
    style, parsers = JsonStyle(max_string=4096, max_items=512, max_depth=16), ("json",)
    name = name_forms(style, parsers)
    assert "llguidance-" in name
    for bound in ("max_string", "max_items", "max_depth"):
        assert name_forms(replace(style, **{bound: 1}), parsers) != name
    assert name_forms(style, ("mistral",)) != name


def test_a_parser_that_is_named_as_the_template_shows_it_changes_nothing():
    usual = AnswerParsers()
    shown = [
        name
        for name in TOOL_FORMATS
        if forms_of(replace(usual, tool_calls=name)) == forms_of(usual)
    ]
    assert len(shown) == 1
    assert answers(replace(usual, tool_calls=shown[0])) == answers(usual)
