"""Every option of a request is a flag of `generate`; what is not given is left to the model."""

from dataclasses import fields
from pathlib import Path

import pytest

from cadenza import SamplingParams, StructuredOutput
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.cli.batch_run import BatchStream, Question
from cadenza.cli.generate import GenerateFlags
from cadenza.cli.generate_view import block
from cadenza.cli.sampling_flags import SamplingFlags
from cadenza.frontend.output_processor import OutputProcessor
from cadenza.frontend.text_frontend import TextFrontend
from tests.cli.harness import ENGINE, Cadenza, Group, taken
from tests.faces.scripted_engine import finished, token

GIVEN: dict[str, tuple[tuple[str, ...], object]] = {
    "max_tokens": (("--max-tokens", "9"), 9),
    "min_tokens": (("--min-tokens", "2"), 2),
    "temperature": (("--temperature", "0.5"), 0.5),
    "top_k": (("--top-k", "7"), 7),
    "top_p": (("--top-p", "0.8"), 0.8),
    "min_p": (("--min-p", "0.1"), 0.1),
    "top_n_sigma": (("--top-n-sigma", "1.5"), 1.5),
    "seed": (("--seed", "3"), 3),
    "presence_penalty": (("--presence-penalty", "-0.5"), -0.5),
    "frequency_penalty": (("--frequency-penalty", "0.5"), 0.5),
    "repetition_penalty": (("--repetition-penalty", "1.1"), 1.1),
    "logit_bias": (("--logit-bias", '{"12": -5, "3": 0.5}'), ((3, 0.5), (12, -5))),
    "allowed_token_ids": (("--allowed-token-ids", "5,6,7"), (5, 6, 7)),
    "bad_words": (("--bad-words", "a b", "--bad-words", "c"), ("a b", "c")),
    "n": (("--n", "2"), 2),
    "ignore_eos": (("--ignore-eos",), True),
    "stop_token_ids": (("--stop-token-ids", "8"), (8,)),
    "stop": (("--stop", "END", "--stop", "\n"), ("END", "\n")),
    "include_stop_str_in_output": (("--include-stop-str-in-output",), True),
    "skip_special_tokens": (("--no-skip-special-tokens",), False),
    "logprobs": (("--logprobs", "4"), 4),
    "prompt_logprobs": (("--prompt-logprobs", "5"), 5),
    "truncate_prompt_tokens": (("--truncate-prompt-tokens", "6"), 6),
    "structured": (("--regex", "a+"), StructuredOutput(regex="a+")),
    "speculative": (("--speculative", "3"), 3),
    "spec_prefill": (("--whole-prompt",), False),
}


GROUPS = (Group("flags", GenerateFlags), Group("sampling", SamplingFlags))


def params_of(*arguments: str) -> SamplingParams:
    """The parameters that `generate` asks for with these flags."""
    found = taken(GROUPS, arguments)
    return SamplingParams(**{**found["sampling"].changes(), **found["flags"].changes()})


def test_every_field_of_sampling_params_has_a_flag():
    assert set(GIVEN) == {field.name for field in fields(SamplingParams)}


def test_a_flag_sets_its_field_and_no_other():
    default = params_of()
    for name, (arguments, meant) in GIVEN.items():
        given = params_of(*arguments)
        changed = {
            field.name
            for field in fields(SamplingParams)
            if getattr(given, field.name) != getattr(default, field.name)
        }
        assert (changed, getattr(given, name)) == ({name}, meant)


def test_a_form_of_the_answer_is_a_flag():
    for flags, meant in (
        (("--json-schema", '{"type": "null"}'), StructuredOutput(json='{"type": "null"}')),
        (("--choice", "a", "--choice", "b"), StructuredOutput(choice=("a", "b"))),
        (("--grammar", 'start: "a"'), StructuredOutput(grammar='start: "a"')),
    ):
        assert params_of(*flags).structured == meant


@pytest.mark.parametrize("flag", ["--json-schema", "--grammar"])
def test_a_form_may_be_a_file(tmp_path: Path, flag: str):
    file = tmp_path / "form"
    file.write_text('{"type": "null"}')
    found = params_of(flag, str(file)).structured
    assert found is not None
    assert (found.json or found.grammar) == '{"type": "null"}'


def test_what_is_not_given_is_left_to_the_model():
    assert SamplingFlags().changes() == {}


def test_a_stop_string_ends_the_answer_and_is_told(cadenza: Cadenza, model: Path):
    flags = ("--temperature", 1.5, "--seed", 8, "--ignore-eos", "--json", *ENGINE)
    whole = cadenza("generate", model, "the", *flags).objects[0]
    stop = whole["text"][4:7]
    cut = cadenza("generate", model, "the", "--stop", stop, *flags).objects[0]
    assert cut["text"] == whole["text"][: whole["text"].find(stop)]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
    assert cut["num_generated_tokens"] == len(cut["token_ids"]) < len(whole["token_ids"])
    assert (whole["stop_reason"], whole["sample"]) == (None, 0)


def test_several_samples_are_printed_with_their_numbers(model: Path):
    text = TextFrontend(open_checkpoint(model))
    prepared = text.prepare("the", {"n": 2})
    stream = BatchStream(index=2, question=Question(shown="the", prepared=prepared))
    stream.processor = OutputProcessor(0, prepared, text)
    for sample, written in enumerate(("fox", "dog")):
        for index, token_id in enumerate(text.encode(written)):
            stream.processor.push(token(0, token_id, index, sample=sample))
        stream.processor.push(finished(0, sample=sample))
    assert block(stream, 5) == "[3.1] the\nfox\n\n[3.2] the\ndog\n\n"
    assert block(stream, 1) == block(stream, 5)
