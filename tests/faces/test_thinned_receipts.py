"""An answer to a thinned prompt has the kept chunks in its receipt, and is replayed from it, by an
engine without a draft model."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from cadenza.config import EngineConfig
from cadenza.fingerprint import Receipt
from cadenza.frontend.loaded_model import LoadedModel, load_model
from cadenza.frontend.output_processor import OutputProcessor, OutputRouter
from cadenza.frontend.prepared_request import PreparedRequest
from cadenza.frontend.receipts import with_receipt
from cadenza.request import Request, SamplingParams
from cadenza.sparse_prefill import KeptTokens, SparsePrefill
from cadenza.verification.replay import read_receipts, replay_receipts

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
