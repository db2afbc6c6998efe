"""Events become outputs: stop strings and the tokens past them, samples, log probabilities."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza import Request, RequestOutput, SamplingParams
from cadenza.errors import InvalidRequestError
from cadenza.events import CacheMiss, Event, PromptLogprobs, Token, TokenLogprobs
from cadenza.frontend.output_processor import OutputProcessor, OutputRouter
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.text.tokens.decoder_stages import BYTE_OF_CHARACTER
from tests.faces.scripted_engine import finished, token

NUM_CASES = 150
NUM_SOAK_CASES = 50_000

PIECES = st.lists(
    st.sampled_from(["the", " quick", " dog", "é", "🙂", "a", "b", "ab", " a b"]), max_size=10
)
STOPS = st.lists(
    st.sampled_from(["a", "ab", "ba", "b a", "é", "🙂", "dog", " quick dog", "quick", "zz"]),
    min_size=1,
    max_size=4,
)


def assembler_of(
    text: TextFrontend, prompt: Sequence[int] = (1,), **options: object
) -> OutputProcessor:
    params = SamplingParams(max_tokens=None, **options)  # type: ignore[arg-type]
    prepared = text.prepare_request(Request(prompt_token_ids=tuple(prompt), params=params))
    return OutputProcessor(0, prepared, text)


def ids_of(text: TextFrontend, written: str) -> list[int]:
    return list(text.encode(written))


def play(processor: OutputProcessor, token_ids: Sequence[int]) -> tuple[list[int], RequestOutput]:
    """Pushes tokens until one ends the sample; the samples to cancel, and the output."""
    stopped = [
        sample
        for index, token_id in enumerate(token_ids)
        if (sample := processor.push(token(0, token_id, index))) is not None
    ]
    processor.push(finished(0, count=len(token_ids)))
    return stopped, processor.output()


def text_after(text: TextFrontend, token_ids: Sequence[int]) -> str:
    return play(assembler_of(text), token_ids)[1].outputs[0].text


def check_stop(
    text: TextFrontend, token_ids: list[int], stops: list[str], is_included: bool
) -> None:
    """What a stop string does is told by the finished text alone."""
    whole = text_after(text, token_ids)
    found = sorted((whole.find(stop), len(stop)) for stop in stops if stop in whole)
    start, length = found[0] if found else (len(whole), 0)
    processor = assembler_of(text, stop=stops, include_stop_str_in_output=is_included)
    _, output = play(processor, token_ids)
    completion = output.outputs[0]
    assert completion.text == whole[: start + length if is_included else start]
    if not found:
        assert (completion.finish_reason, completion.stop_reason) == ("length", None)
        assert completion.token_ids == tuple(token_ids)
        return
    assert completion.finish_reason == "stop"
    assert completion.stop_reason == whole[start : start + length]
    count = len(completion.token_ids)
    assert completion.num_generated_tokens == count
    assert completion.token_ids == tuple(token_ids[:count])
    assert len(text_after(text, token_ids[:count])) >= start + length
    # One token less does not complete it: a character cut in two shows as a replacement.
    assert not text_after(text, token_ids[: count - 1]).startswith(whole[: start + length])


@settings(max_examples=NUM_CASES)
@given(pieces=PIECES, stops=STOPS, is_included=st.booleans(), is_bytewise=st.booleans())
def test_a_stop_string_cuts_as_it_would_cut_the_finished_text(
    worded_text: TextFrontend,
    pieces: list[str],
    stops: list[str],
    is_included: bool,
    is_bytewise: bool,
):
    token_ids = spell(worded_text, pieces, is_bytewise)
    check_stop(worded_text, token_ids, stops, is_included)


@pytest.mark.soak
@settings(max_examples=NUM_SOAK_CASES)
@given(pieces=PIECES, stops=STOPS, is_included=st.booleans(), is_bytewise=st.booleans())
def test_any_of_many_stop_strings_cuts_as_it_would_cut_the_finished_text(
    worded_text: TextFrontend,
    pieces: list[str],
    stops: list[str],
    is_included: bool,
    is_bytewise: bool,
):
    token_ids = spell(worded_text, pieces, is_bytewise)
    check_stop(worded_text, token_ids, stops, is_included)


def spell(text: TextFrontend, pieces: list[str], is_bytewise: bool) -> list[int]:
    """Tokens of each piece by itself; or a token for each byte."""
    if not is_bytewise:
        return [token_id for piece in pieces for token_id in ids_of(text, piece)]
    characters = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}
    names = [characters[byte] for byte in "".join(pieces).encode()]
    found = [text.tokenizer.id_of(name) for name in names if text.tokenizer is not None]
    return [token_id for token_id in found if token_id is not None]


def test_a_match_ends_the_sample_once_and_what_follows_is_dropped(worded_text: TextFrontend):
    token_ids = ids_of(worded_text, "the dog and the dog")
    stopped, output = play(assembler_of(worded_text, stop=["dog"]), token_ids)
    assert stopped == [0]
    assert output.outputs[0].text == "the "
    assert output.finished


def test_tokens_past_a_stop_string_are_never_shown_while_it_waits_for_an_earlier_one(
    worded_text: TextFrontend,
):
    processor = assembler_of(worded_text, stop=["bc", "abcdef"])
    shown: list[int] = []
    for index, character in enumerate("abcdex"):
        (token_id,) = ids_of(worded_text, character)
        processor.push(token(0, token_id, index))
        shown.append(len(processor.output().outputs[0].token_ids))
    assert shown == [1, 2, 3, 3, 3, 3]
    assert processor.output().outputs[0].text == "a"


def test_text_that_may_begin_a_stop_string_comes_out_at_the_end(worded_text: TextFrontend):
    processor = assembler_of(worded_text, stop=["dog house"])
    for index, token_id in enumerate(ids_of(worded_text, "the dog")):
        processor.push(token(0, token_id, index))
    assert processor.output().outputs[0].text == "the "
    processor.push(finished(0))
    completion = processor.output().outputs[0]
    assert (completion.text, completion.finish_reason) == ("the dog", "length")


def test_stop_strings_are_not_looked_for_in_the_first_min_tokens(worded_text: TextFrontend):
    token_ids = ids_of(worded_text, "dog dog dog")
    per_word = len(token_ids) // 3
    _, output = play(assembler_of(worded_text, stop=["dog"], min_tokens=per_word), token_ids)
    assert output.outputs[0].text == "dog "


@settings(max_examples=NUM_CASES)
@given(pieces=PIECES, stops=STOPS, reads=st.lists(st.booleans(), min_size=12, max_size=12))
def test_deltas_put_together_are_the_whole_output(
    worded_text: TextFrontend, pieces: list[str], stops: list[str], reads: list[bool]
):
    processor = assembler_of(worded_text, stop=stops, logprobs=1)
    deltas: list[RequestOutput | None] = []
    token_ids = spell(worded_text, pieces, False)
    for index, token_id in enumerate(token_ids):
        processor.push(likely(token_id, index))
        if reads[index % len(reads)]:
            deltas.append(processor.make_output("delta"))
    processor.push(finished(0, count=len(token_ids)))
    deltas.append(processor.make_output("delta"))
    assert processor.make_output("delta") is None
    parts = [delta.outputs[0] for delta in deltas if delta is not None]
    whole = processor.output().outputs[0]
    assert "".join(part.text for part in parts) == whole.text
    assert sum((part.token_ids for part in parts), ()) == whole.token_ids
    assert sum((part.logprobs or () for part in parts), ()) == (whole.logprobs or ())
    assert parts[-1].finish_reason == whole.finish_reason
    assert parts[-1].cumulative_logprob == whole.cumulative_logprob
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)


def likely(token_id: int, index: int) -> Token:
    found = TokenLogprobs(logprob=-0.25, rank=2, top_ids=(7,), top_logprobs=(-0.125,))
    return Token(request_id=0, token_id=token_id, index=index, logprobs=found)


def test_log_probabilities_past_a_stop_string_do_not_count(worded_text: TextFrontend):
    token_ids = ids_of(worded_text, "ab dog")
    processor = assembler_of(worded_text, stop=["a"], logprobs=1)
    for index, token_id in enumerate(token_ids):
        processor.push(likely(token_id, index))
    completion = processor.output().outputs[0]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == len(completion.token_ids) == 1
    assert completion.cumulative_logprob == -0.25
    assert completion.logprobs[0][token_ids[0]].decoded_token == "a"


def test_samples_grow_side_by_side_and_end_each_by_itself(worded_text: TextFrontend):
    processor = assembler_of(worded_text, n=3, stop=["dog"])
    router = OutputRouter(lambda request_id, sample: cancelled.append((request_id, sample)))
    cancelled: list[tuple[int, int]] = []
    router.add(processor)
    (fox,), (dog,) = ids_of(worded_text, " fox")[:1], ids_of(worded_text, " dog")
    steps: list[list[Event]] = [
        [token(0, fox, 0, sample=0), token(0, dog, 0, sample=1)],
        [token(0, fox, 1, sample=0), token(0, fox, 1, sample=1), token(0, fox, 0, sample=2)],
        [finished(0, sample=0, count=2)],
    ]
    for step in steps:
        assert router.push(step) == [processor]
        assert not processor.is_finished
    assert router.push([finished(0, sample=2)]) == [processor]
    output = processor.output()
    assert output.finished
    assert cancelled == [(0, 1)]
    assert [each.index for each in output.outputs] == [0, 1, 2]
    assert [each.token_ids for each in output.outputs] == [(fox, fox), (dog,), (fox,)]
    assert [each.stop_reason for each in output.outputs] == [None, "dog", None]
    assert router.push([token(0, fox)]) == []


def test_cached_tokens_are_told_even_when_a_stop_string_ends_the_request(worded_text: TextFrontend):
    processor = assembler_of(worded_text, stop=["a"])
    (token_id,) = ids_of(worded_text, "a")
    miss = CacheMiss(shared_tokens=50, reason="differs")
    processor.push(
        Token(request_id=0, token_id=token_id, index=0, num_cached_tokens=48, cache_miss=miss)
    )
    output = processor.output()
    assert output.finished
    assert output.num_cached_tokens == 48
    assert output.cache_miss == miss


def test_a_delta_has_only_samples_with_something_new(worded_text: TextFrontend):
    processor = assembler_of(worded_text, n=2)
    processor.push(token(0, 5, 0, sample=1))
    delta = processor.make_output("delta")
    assert delta is not None
    assert [each.index for each in delta.outputs] == [1]
    assert not delta.finished


def test_prompt_log_probabilities_come_in_parts_and_the_first_token_has_none(
    worded_text: TextFrontend,
):
    prompt = ids_of(worded_text, "the quick dog")
    processor = assembler_of(worded_text, prompt, prompt_logprobs=1)
    entries = [
        TokenLogprobs(logprob=-float(at), rank=1, top_ids=(at,), top_logprobs=(-0.5,))
        for at in range(1, len(prompt))
    ]
    processor.push(PromptLogprobs(request_id=0, start=1, entries=tuple(entries[:1])))
    processor.push(PromptLogprobs(request_id=0, start=2, entries=tuple(entries[1:])))
    found = processor.output().prompt_logprobs
    assert found is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for at, each in enumerate(found[1:], start=1):
        assert each is not None
        assert each[prompt[at]].logprob == -float(at)


def test_special_tokens_are_skipped_or_shown(worded_text: TextFrontend):
    assert worded_text.tokenizer is not None
    user = worded_text.tokenizer.id_of("<|user|>")
    assert user is not None
    token_ids = [*ids_of(worded_text, "dog"), user, *ids_of(worded_text, "dog")]
    assert text_after(worded_text, token_ids) == "dogdog"
    _, output = play(assembler_of(worded_text, skip_special_tokens=False), token_ids)
    assert output.outputs[0].text == "dog<|user|>dog"


def test_a_prompt_is_cut_to_its_last_tokens(worded_text: TextFrontend):
    params = SamplingParams(truncate_prompt_tokens=3)
    prepared = worded_text.prepare([1, 2, 3, 4, 5], params)
    assert prepared.request.prompt_token_ids == (3, 4, 5)
    assert worded_text.prepare_request(prepared.request).request == prepared.request
    assert worded_text.prepare([1, 2], params).request.prompt_token_ids == (1, 2)


def test_bad_words_are_spelt_at_the_start_and_within_a_text(worded_text: TextFrontend):
    prepared = worded_text.prepare([1], SamplingParams(bad_words=["dog", " dog"]))
    expected = {worded_text.encode("dog"), worded_text.encode(" dog")}
    assert set(prepared.request.bad_word_token_ids) == expected


@pytest.mark.parametrize("options", [{"stop": ["a"]}, {"bad_words": ["a"]}])
def test_text_options_without_a_tokenizer_are_refused_by_name(
    tiny_text: TextFrontend, options: dict[str, list[str]]
):
    params = SamplingParams(**options)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=r"tokenizer\.json") as refusal:
        tiny_text.prepare([1], params)
    assert refusal.value.param == next(iter(options))
