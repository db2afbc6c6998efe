"""Replays receipts: each request is computed again, alone, here or at the server that gave the
receipt (`POST /v1/receipts/replay`), and compared. Invariant: a receipt is equal only if its
fingerprint fits and every token and every bit of every log probability is."""

import re
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from cadenza.config import EngineConfig
from cadenza.errors import (
    CadenzaError,
    CheckpointError,
    ConfigError,
    InvalidRequestError,
    show_size,
)
from cadenza.fingerprint import (
    RECEIPT_VERSION,
    Fingerprint,
    Receipt,
    digest_of_logprobs,
    sparse_prefill_of,
)
from cadenza.frontend.loaded_model import LoadedModel, PlannedModel, open_model
from cadenza.frontend.output_processor import OutputProcessor, OutputRouter
from cadenza.frontend.prepared_request import PreparedRequest, RequestOptions
from cadenza.loading.engine_plan import pages_for_batch, with_pool
from cadenza.loading.identity import find_setting
from cadenza.loading.planned_engine import PlannedEngine
from cadenza.request import Request
from cadenza.sparse_prefill import NO_MODEL, SpecPrefillConfig
from cadenza.verification.remote_server import BusyError, RefusedError, RemoteApi

MAX_RECEIPT_BYTES = 1 << 30

# Parts that a replay does not use: a receipt has the prompt's ids and all parameters, and no
# constrained answer.
_NOT_COMPUTED_FROM = frozenset({"template", "defaults", "forms"})


# Of other commands: a replay has --model.
_FLAG = re.compile(r"(?<!\w)--(?!model(?![-\w]))[a-z][a-z-]*")
# Flags of the engine, and the parts of a fingerprint that set them in a replay.
_PARTS = {
    "--arithmetic": "arithmetic",
    "--dtype": "activations",
    "--kv-cache-dtype": "kv",
    "--max-model-len": "max_model_len",
    "--quantization": "weights",
}


class ReceiptError(InvalidRequestError):
    """A file is no receipt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The verdict on one receipt; `differences` are sentences, and empty where it is equal."""

    source: str
    num_tokens: int
    differences: tuple[str, ...] = ()

    @property
    def is_equal(self) -> bool:
        return not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReceipt:
    """A receipt and where it was read."""

    source: str
    receipt: Receipt


def read_receipts(path: Path) -> list[NamedReceipt]:
    """One a line, or a single JSON object. Raises ReceiptError, with file and line."""
    try:
        if path.stat().st_size > MAX_RECEIPT_BYTES:
            raise ReceiptError(
                f"{path} has over {show_size(MAX_RECEIPT_BYTES)}; give a file of receipts"
            )
        text = path.read_bytes()
    except OSError as error:
        raise ReceiptError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return [NamedReceipt(source=str(path), receipt=_decode(text, str(path)))]
    except ReceiptError:
        lines = [line for line in text.splitlines() if line.strip()]
        if len(lines) < 2:
            raise
    named = ((f"{path}:{number}", line) for number, line in enumerate(lines, start=1))
    return [NamedReceipt(source=name, receipt=_decode(line, name)) for name, line in named]


def _decode(text: bytes, where: str) -> Receipt:
    try:
        receipt = msgspec.json.decode(text, type=Receipt)
    except (msgspec.DecodeError, InvalidRequestError) as error:
        raise ReceiptError(
            f"{where} is no receipt: {error}; receipts come from `cadenza generate --receipt` and "
            f"from answers to requests with `receipt`"
        ) from error
    if receipt.receipt != RECEIPT_VERSION:
        raise ReceiptError(
            f"{where} is a receipt of version {receipt.receipt}; this Cadenza reads "
            f"{RECEIPT_VERSION}"
        )
    return receipt


def replay_receipts(model: str | None, receipts: Iterable[NamedReceipt]) -> Iterator[Replayed]:
    """In groups of receipts that ask for one engine. Raises CheckpointError,
    DeviceUnavailableError."""
    groups: dict[EngineConfig, list[NamedReceipt]] = {}
    for each in receipts:
        groups.setdefault(config_of(each.receipt.fingerprint), []).append(each)
    for config, group in groups.items():
        try:
            planned = open_model(model, config)
        except ConfigError as error:
            for each in group:
                found = (*_default_model_note(model), *_other_model(each.receipt, error))
                yield _verdict(each, found)
            continue
        except CheckpointError as error:
            raise CheckpointError(_of_receipt(error)) from error
        engine = PlannedEngine(checkpoint=planned.checkpoint, plan=planned.plan, config=config)
        here = planned.text.with_forms(engine.identity().fingerprint)
        fitting = [each for each in group if not _unfit(each.receipt, here)]
        for each in group:
            if each not in fitting:
                is_other = each.receipt.fingerprint.checkpoint != here.checkpoint
                note = _default_model_note(model) if is_other else ()
                unfit = (*_changes(each.receipt), *_unfit(each.receipt, here))
                advice = _advice(each.receipt, here, config)
                yield _verdict(each, (*note, *unfit, *advice))
        if fitting:
            with closing(_load(planned, fitting)) as loaded:
                for each in fitting:
                    yield _verdict(each, _compare(each.receipt, here, loaded))


def config_of(fingerprint: Fingerprint) -> EngineConfig:
    """The options that decide the bits of a receipt. Raises ReceiptError."""
    try:
        return EngineConfig(
            dtype=fingerprint.activations,  # pyright: ignore[reportArgumentType]
            quantization=fingerprint.weights  # pyright: ignore[reportArgumentType]
            if fingerprint.weights in ("int8", "int4")
            else "none",
            kv_cache_dtype="int8" if fingerprint.kv == "int8" else "auto",
            arithmetic="portable" if fingerprint.arithmetic.startswith("portable") else "fast",
            max_model_len=fingerprint.max_model_len,
            max_num_seqs=1,
            spec_prefill=SpecPrefillConfig(model=NO_MODEL) if fingerprint.sparse_prefill else None,
            enable_prefix_caching=False,
        )
    except CadenzaError as error:
        raise ReceiptError(
            f"the receipt's fingerprint has unknown parts: {_of_receipt(error)}"
        ) from error


def _default_model_note(model: str | None) -> tuple[str, ...]:
    if model is not None:
        return ()
    return (
        "it is not from the bundled model, which is taken without --model; name the receipt's own "
        "model with --model",
    )


def _other_model(receipt: Receipt, error: ConfigError) -> Iterator[str]:
    yield from _changes(receipt)
    yield (
        f"the model cannot be opened as the receipt asks: {_of_receipt(error)}; --model names the "
        f"receipt's own, whose checkpoint is {receipt.fingerprint.checkpoint}"
    )


def _of_receipt(error: CadenzaError) -> str:
    def named(flag: re.Match[str]) -> str:
        part = _PARTS.get(flag[0])
        return f"the setting {flag[0][2:]}" if part is None else f"the receipt's {part}"

    fault, *others = str(error).split("; ")
    kept = (each for each in others if not _FLAG.search(each))
    return _FLAG.sub(named, "; ".join((fault, *kept)))


def _verdict(each: NamedReceipt, differences: Iterable[str]) -> Replayed:
    return Replayed(
        source=each.source, num_tokens=len(each.receipt.token_ids), differences=tuple(differences)
    )


def _load(planned: PlannedModel, receipts: list[NamedReceipt]) -> LoadedModel:
    requests = [_prepared(planned, each.receipt).request for each in receipts]
    num_pages = pages_for_batch(requests, planned.plan.limits)
    return replace(planned, plan=with_pool(planned.plan, planned.config, num_pages)).load()


def _prepared(planned: PlannedModel | LoadedModel, receipt: Receipt) -> PreparedRequest:
    request = Request(
        prompt_token_ids=receipt.prompt_token_ids,
        params=receipt.params,
        sparse_prefill=sparse_prefill_of(receipt),
    )
    return planned.text.prepare_request(request, RequestOptions(has_receipt=True))


def _unfit(receipt: Receipt, here: Fingerprint) -> list[str]:
    return [text for name, text in _other_parts(receipt, here) if name not in _NOT_COMPUTED_FROM]


def _other_parts(receipt: Receipt, here: Fingerprint) -> list[tuple[str, str]]:
    """Those of the fingerprint that differ, each with a sentence."""
    theirs, ours = receipt.fingerprint.parts, here.parts
    return [
        (
            name,
            f"the {name} does not fit: {theirs[name] or 'none'} in the receipt, "
            f"{ours[name] or 'none'} here",
        )
        for name in theirs
        if name != "sparse_prefill" and theirs[name] != ours[name]  # what was kept is given
    ]


def _advice(receipt: Receipt, here: Fingerprint, config: EngineConfig) -> Iterator[str]:
    theirs, ours = receipt.fingerprint.arithmetic, here.arithmetic
    setting = find_setting(theirs, ours, config.backend)
    if setting is not None:
        yield f"this machine can compute in {theirs}, too: set {setting} and replay again"


def _changes(receipt: Receipt) -> Iterator[str]:
    if receipt.system_fingerprint != receipt.fingerprint.digest:
        yield "the receipt was changed: its system_fingerprint is not that of its parts"
    if receipt.logprob_digest != digest_of_logprobs(receipt.logprobs):
        yield "the receipt was changed: its logprob_digest is not that of its log probabilities"


def _compare(receipt: Receipt, here: Fingerprint, loaded: LoadedModel) -> Iterator[str]:
    yield from _changes(receipt)
    for _, text in _other_parts(receipt, here):
        yield text
    again = _recompute(receipt, loaded)
    if isinstance(again, str):
        yield again
        return
    yield from receipt_difference(receipt, again)


def _recompute(receipt: Receipt, loaded: LoadedModel) -> Receipt | str:
    """The receipt of the request, run alone; a sentence if it cannot be served."""
    try:
        prepared = _prepared(loaded, receipt)
        request_id = loaded.core.submit(prepared.request)
    except CadenzaError as error:
        return f"the request cannot be served here: {_of_receipt(error)}"
    processor = OutputProcessor(request_id, prepared, loaded.text, loaded.fingerprint)
    router = OutputRouter(loaded.core.cancel)
    router.add(processor)
    while not processor.is_finished:
        router.push(loaded.core.step())
    output = processor.output().outputs[0]
    return output.receipt or f"the replay ended with an error: {output.error}"


def receipt_difference(receipt: Receipt, again: Receipt) -> Iterator[str]:
    theirs = [*zip(receipt.token_ids, receipt.logprobs, strict=False)]
    ours = [*zip(again.token_ids, again.logprobs, strict=False)]
    for place, (old, new) in enumerate(zip(theirs, ours, strict=False)):
        if old[0] != new[0]:
            yield (
                f"token {place} differs: {old[0]} (log probability {old[1]:.9g}) in the receipt, "
                f"{new[0]} ({new[1]:.9g}) here"
            )
            return
        if digest_of_logprobs(old[1:]) != digest_of_logprobs(new[1:]):
            yield (
                f"the log probability of token {place} differs by {abs(new[1] - old[1]):.3g}: "
                f"{old[1]:.9g} in the receipt, {new[1]:.9g} here"
            )
            return
    lengths = (len(receipt.token_ids), len(receipt.logprobs), len(again.token_ids))
    if len(set(lengths)) > 1:
        yield (
            f"the receipt has {lengths[0]} tokens and {lengths[1]} log probabilities, the replay "
            f"{lengths[2]} tokens; the first {min(lengths)} are equal"
        )
    elif receipt.finish_reason != again.finish_reason:
        yield (
            f"the finish reason differs: {receipt.finish_reason} in the receipt, "
            f"{again.finish_reason} here"
        )


PATH = "/v1/receipts/replay"
RETRY_S, MAX_RETRIES = 0.2, 300  # while the server replays another one's receipt


def replay_at(
    api: RemoteApi, receipts: Iterable[NamedReceipt], model: str | None = None
) -> Iterator[Replayed]:
    """In the receipts' order; `model`: one of several of the server's. Raises ConfigError if there
    is no answer."""
    for each in receipts:
        num_tokens = len(each.receipt.token_ids)
        differences = tuple(_differences(api, each, model))
        yield Replayed(source=each.source, num_tokens=num_tokens, differences=differences)


def _differences(api: RemoteApi, each: NamedReceipt, model: str | None) -> Iterator[str]:
    body: dict[str, Any] = {"receipt": msgspec.to_builtins(each.receipt)}
    if model is not None:
        body["model"] = model
    try:
        answer = _answer(api, body)
    except RefusedError as error:
        yield str(error)
        return
    if answer["equal"]:
        return
    again = msgspec.structs.replace(
        each.receipt, token_ids=tuple(answer["tokens"]), logprobs=tuple(answer["logprobs"])
    )
    found = [*receipt_difference(each.receipt, again)]
    yield from found or ["the finish reason or the digest of the log probabilities differs"]


def _answer(api: RemoteApi, body: dict[str, Any]) -> Any:
    for _ in range(MAX_RETRIES):
        try:
            return api.fetch(PATH, body)
        except BusyError:
            time.sleep(RETRY_S)
    return api.fetch(PATH, body)
