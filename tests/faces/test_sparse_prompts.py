"""Which prompts are thinned out, and what is kept of them whatever it scores."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.errors import InvalidRequestError
from cadenza.fingerprint import Fingerprint, Receipt
from cadenza.frontend.answers import AskedAnswer, ToolUse
from cadenza.frontend.loaded_model import LoadedModel, load_model
from cadenza.frontend.output_processor import OutputProcessor, OutputRouter
from cadenza.frontend.prepared_request import ChatPrompt, PreparedRequest
from cadenza.frontend.receipts import with_receipt
from cadenza.frontend.sparse_prompts import SparsePrompts
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.request import Attachment, PoolingParams, Request, SamplingParams
from cadenza.sparse_prefill import (
    KeptTokens,
    PromptSpan,
    SparsePrefill,
    SpecPrefillChoice,
    SpecPrefillConfig,
)
from cadenza.verification.replay import read_receipts, replay_receipts

CONFIG = SpecPrefillConfig(keep=0.25, threshold=200, head=100)
SERVER = SparsePrompts(config=CONFIG, scored_tokens=1000)
SYSTEM = {"role": "system", "content": "You answer about the text. " * 3}
TEXT = {"role": "user", "content": "It was a long day in the harbour. " * 60}
QUESTION = {"role": "user", "content": "What was the day like?"}


@pytest.fixture(scope="module")
def text() -> TextFrontend:
    found = TextFrontend(open_checkpoint(None), max_model_len=4096)
    found.sparse = SERVER
    return found


def request(num_tokens: int = 300, **options: Any) -> Request:
    return Request(prompt_token_ids=(7,) * num_tokens, params=SamplingParams(**options))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(), None),
        (request(spec_prefill=True), None),
        (request(200), None),
        (request(199), "short"),
        (request(199, spec_prefill={"threshold": 100}), None),
        (request(300, spec_prefill={"threshold": 301}), "short"),
        (request(spec_prefill=False), "declined"),
        (request(prompt_logprobs=0), "prompt_logprobs"),
        (request(repetition_penalty=1.1), "repetition_penalty"),
        (request(1000), None),
        (request(1001), "draft_context"),
        (Request(prompt_token_ids=(7,) * 300, pooling=PoolingParams(pooling="last")), "pooling"),
        (replace(request(), attachments=(Attachment(start=3, length=4, digest=b"x"),)), "images"),
    ],
)
def test_a_prompt_is_thinned_out_unless_there_is_a_reason(asked: Request, reason: str | None):
    found = SERVER.pruned(asked)
    assert (found.sparse_prefill is None) == (reason is not None)
    use = SERVER.planned_use(found)
    assert use is not None
    assert use.whole_because == reason
    assert use.num_kept_tokens + use.num_skipped_tokens == len(asked.prompt_token_ids)
    assert (use.num_skipped_tokens > 0) == (reason is None)


def test_a_server_without_it_says_so_to_who_asks_and_nothing_to_others():
    plain = SparsePrompts()
    for asked, reason in ((request(), None), (request(spec_prefill=True), "off")):
        found = plain.planned_use(plain.pruned(asked))
        assert (None if found is None else found.whole_because) == reason
        assert plain.pruned(asked).sparse_prefill is None


def test_a_request_chooses_for_itself_where_it_may():
    own = SpecPrefillChoice(keep=0.5, when="cold", spans=(PromptSpan(150, 151),))
    asked = request(spec_prefill=own)
    found = SERVER.pruned(asked).sparse_prefill
    assert found is not None
    assert (found.keep, found.when, found.forced) == (0.5, "cold", own.spans)
    strict = SparsePrompts(config=replace(CONFIG, allow_request=False))
    with pytest.raises(InvalidRequestError, match="this server's own choice"):
        strict.pruned(asked)
    for plain in (True, None, False):
        assert (strict.pruned(request(spec_prefill=plain)).sparse_prefill is None) == (
            plain is False
        )


def prepared(text: TextFrontend, messages: list[Mapping[str, Any]], **options: Any) -> Request:
    return text.prepare(ChatPrompt(messages=messages), SamplingParams(**options)).request


def forced_texts(text: TextFrontend, found: Request) -> list[str]:
    assert found.sparse_prefill is not None
    ids = found.prompt_token_ids
    return [text.decode(ids[start:stop]) for start, stop in found.sparse_prefill.forced]


def test_the_head_and_the_last_question_of_a_conversation_are_kept(text: TextFrontend):
    found = prepared(text, [SYSTEM, TEXT, {"role": "assistant", "content": "Yes."}, QUESTION])
    head, question = forced_texts(text, found)
    assert head.endswith(f"{SYSTEM['content']}<|im_end|>\n<|im_start|>user\n")
    assert question.startswith(QUESTION["content"])
    assert found.sparse_prefill is not None
    assert found.sparse_prefill.cold_from == found.sparse_prefill.forced[0].stop
    alone = prepared(text, [TEXT])
    head, beginning = forced_texts(text, alone)
    assert head == "<|im_start|>user\n"
    assert TEXT["content"].startswith(beginning)


def test_tools_are_of_the_head_which_is_as_long_as_configured_at_most(text: TextFrontend):
    described = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    chat = text.prepare(ChatPrompt(messages=[SYSTEM, TEXT], tools=described), SamplingParams())
    head, _ = forced_texts(text, chat.request)
    assert "look_up" in head
    asked = AskedAnswer(use=ToolUse.of_rendered(described))
    answer = text.prepare(ChatPrompt(messages=[SYSTEM, TEXT], asked=asked), SamplingParams())
    assert forced_texts(text, answer.request)[0] == head
    long = {"role": "system", "content": SYSTEM["content"] * 10}
    forced = prepared(text, [long, TEXT]).sparse_prefill
    assert forced is not None
    assert forced.forced[0] == PromptSpan(0, CONFIG.head)


def test_places_move_with_a_prompt_that_is_cut(text: TextFrontend):
    messages = [SYSTEM, TEXT, {"role": "assistant", "content": "Yes."}, QUESTION]
    whole = len(prepared(text, messages).prompt_token_ids)
    found = prepared(text, messages, truncate_prompt_tokens=whole - 10)
    head, question = forced_texts(text, found)
    assert head.endswith("<|im_start|>user\n")
    assert not head.startswith("<|im_start|>system")
    assert question.startswith(QUESTION["content"])
    found = prepared(text, messages, truncate_prompt_tokens=whole - 150)
    assert [each.startswith("What") for each in forced_texts(text, found)] == [True]


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


def test_answers_to_thinned_prompts_have_a_fingerprint_of_what_decides_the_kept_chunks():
    thinned = SERVER.pruned(request())
    digests = {
        WHOLE.digest,
        SERVER.fingerprint_of(thinned, WHOLE).digest,
        SERVER.fingerprint_of(SERVER.pruned(request(spec_prefill={"keep": 0.5})), WHOLE).digest,
        SERVER.fingerprint_of(SERVER.pruned(request(spec_prefill={"when": "cold"})), WHOLE).digest,
        SERVER.fingerprint_of(thinned, structs.replace(WHOLE, scorer="other")).digest,
        replace(SERVER, config=replace(CONFIG, head=7)).fingerprint_of(thinned, WHOLE).digest,
    }
    assert len(digests) == 6
    whole = SERVER.pruned(request(spec_prefill=False))
    assert SERVER.fingerprint_of(whole, WHOLE) == WHOLE
    assert structs.replace(WHOLE, scorer="").digest == WHOLE.digest, (
        "of whole prompts it is no part"
    )


KEPT = KeptTokens(num_prompt_tokens=300, chunks=(0, 3, 4, 8, 9))


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=64, spec_prefill={"model": "none"})
    found = load_model(None, config)
    yield found
    found.close()


def receipt_of(loaded: LoadedModel, sparse: SparsePrefill | None) -> Receipt:
    ids = loaded.text.encode("The bell is in the tower. Tom went to the river. " * 30)[:300]
    params = SamplingParams(max_tokens=6, temperature=0.0)
    request = Request(prompt_token_ids=ids, params=params, sparse_prefill=sparse)
    prepared = with_receipt(PreparedRequest(text=None, request=request))
    request_id = loaded.core.submit(prepared.request)
    processor = OutputProcessor(request_id, prepared, loaded.text, loaded.fingerprint)
    router = OutputRouter(loaded.core.cancel)
    router.add(processor)
    while not processor.is_finished:
        router.push(loaded.core.step())
    output = processor.output()
    receipt = output.outputs[0].receipt
    assert receipt is not None
    assert output.system_fingerprint == receipt.system_fingerprint
    return receipt


def test_a_thinned_answer_is_replayed_from_the_chunks_in_its_receipt(
    loaded: LoadedModel, tmp_path: Path
):
    thinned = receipt_of(loaded, SparsePrefill(keep=0.3, kept=KEPT.mask))
    whole = receipt_of(loaded, None)
    assert (thinned.kept, whole.kept) == (KEPT.mask, msgspec.UNSET)
    assert thinned.system_fingerprint != whole.system_fingerprint == loaded.fingerprint.digest
    assert thinned.logprobs != whole.logprobs
    others = KeptTokens(num_prompt_tokens=300, chunks=(0, 2, 4, 8, 9))
    forged = msgspec.structs.replace(thinned, kept=others.mask)
    lines = [msgspec.json.encode(each) for each in (thinned, whole, forged)]
    file = tmp_path / "receipts.jsonl"
    file.write_bytes(b"\n".join(lines))
    verdicts = [*replay_receipts(None, read_receipts(file))]
    found = {each.source: each.differences for each in verdicts}
    assert [bool(differences) for differences in found.values()].count(True) == 1
    (forged_differences,) = filter(None, found.values())
    assert "differs" in forged_differences[0]
