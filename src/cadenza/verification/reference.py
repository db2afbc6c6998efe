"""`ReferenceEngine`: one request at a time, without scheduler, pages, batch, prefix cache or
kernels; its numpy sampler sorts where the engine bisects. It shares with the engine only the
definition of draw keys (`core.draw_keys`) and the validation of requests (`RequestCheck`).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt

from cadenza.backends import BACKENDS, Backends, find_backend, resolve_backend
from cadenza.backends.base import SeeingModel, SequenceModel
from cadenza.batch.draw_keys import derive_sample_seed, draw_keys
from cadenza.bounds import as_token_ids
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import MAX_SEED, EngineConfig, EngineLimits, ImageLimits
from cadenza.engine.request_check import RequestCheck
from cadenza.errors import CheckpointError, ConfigError, InvalidRequestError, show
from cadenza.events import FinishReason
from cadenza.option import is_integer
from cadenza.request import Request, SamplingParams
from cadenza.structured import CompileConstraint, Constraint

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """The output tokens, the log probability of each, and the finish reason."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


class ReferenceEngine:
    """Runs requests alone. `max_model_len` limits prompt and output together, in tokens;
    `images` is of a model that sees, whose placeholder is never sampled; it has no slots where
    its model takes none."""

    def __init__(
        self,
        model: SequenceModel,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
        compile_constraint: CompileConstraint | None = None,
        images: ImageLimits | None = None,
    ) -> None:
        self._model = model
        self._placeholder = None if images is None else images.token_id
        self._sees = sees = images is not None and images.num_slots > 0
        self._compile_constraint = compile_constraint
        self._max_model_len = max_model_len
        self._check = RequestCheck(
            limits=EngineLimits(  # one sequence in one page
                max_num_seqs=1,
                max_num_batched_tokens=1,
                max_model_len=max_model_len,
                page_size=max_model_len,
                num_pages=1,
                max_num_queued_reqs=1,
                images=images if sees else None,
            ),
            vocab_size=model.vocab_size,
            backend="reference",
            capabilities=frozenset({"logprobs", "attachments"} if sees else {"logprobs"}),
            has_constraints=compile_constraint is not None,
        )
        self._eos_token_ids = frozenset(eos_token_ids)

    def run(self, request: Request, *, seed: int | None = None, sample: int = 0) -> ReferenceResult:
        """The stream of the sample with this index; `seed` is used if the request has none. Raises
        InvalidRequestError for the same requests as `EngineCore.submit`."""
        self._check.check(request)
        _check_integer("seed", 0 if seed is None else seed, MAX_SEED)
        params = request.params
        _check_integer("sample", sample, params.n - 1)
        stop = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop |= self._eos_token_ids
        used_seed = derive_sample_seed(
            params.seed if params.seed is not None else (seed or 0), sample
        )
        limit = self._max_model_len - len(request.prompt_token_ids)
        if params.max_tokens is not None:
            limit = params.max_tokens
        token_ids: list[int] = []
        logprobs: list[float] = []
        if not limit:
            return _result(token_ids, logprobs, "length")
        constraint = self._constraint_of(request)
        logits = self._begin(request)
        while True:
            position = len(request.prompt_token_ids) + len(token_ids)
            ruled = ruled_logits(logits, request, token_ids, stop)
            if constraint is not None:
                mask = np.unpackbits(
                    np.frombuffer(constraint.allowed(), np.uint8), bitorder="little"
                )
                ruled[mask[: len(ruled)] == 0] = -np.inf
            if self._placeholder is not None:
                ruled[self._placeholder] = -np.inf
            if np.isneginf(ruled).all():
                return _result(token_ids, logprobs, "error")
            token_id = choose_token(ruled, params, seed=used_seed, position=position)
            if token_id in stop:
                break
            token_ids.append(token_id)
            logprobs.append(float(log_softmax(logits)[token_id]))
            if constraint is not None:
                constraint.accept(token_id)
                if constraint.is_complete:
                    return _result(token_ids, logprobs, "stop")
            if len(token_ids) == limit:
                break
            logits = self._model.append([token_id])
        reason: FinishReason = "length" if len(token_ids) == limit else "stop"
        return _result(token_ids, logprobs, reason)

    def takes(self, request: Request) -> bool:
        return request.sparse_prefill is None and (self._sees or not request.attachments)

    def _begin(self, request: Request) -> Logits:
        self._model.start()
        if request.attachments:
            assert isinstance(self._model, SeeingModel), "the check refuses other requests"
            self._model.see(request.attachments)
        return self._model.append(list(request.prompt_token_ids))

    def _constraint_of(self, request: Request) -> Constraint | None:
        if request.constraint is None:
            return None
        assert self._compile_constraint is not None, "the check refuses such requests"
        return self._compile_constraint(request.constraint).result()

    def score_output(self, request: Request, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Of each output token, given the prompt and the preceding ones."""
        logits = self._begin(request)
        logprobs: list[float] = []
        for token_id in token_ids:
            logprobs.append(float(log_softmax(logits)[token_id]))
            logits = self._model.append([token_id])
        return tuple(logprobs)

    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """The log probability of each token but the first, given the preceding ones. Raises
        InvalidRequestError."""
        ids = as_token_ids("prompt", token_ids)
        for token_id in ids:
            _check_integer("a token id", token_id, self._model.vocab_size - 1)
        _check_integer("the number of tokens", len(ids), self._max_model_len)
        self._model.start()
        logprobs: list[float] = []
        for token_id, following in pairwise(ids):
            logits = self._model.append([token_id])
            logprobs.append(float(log_softmax(logits)[following]))
        return tuple(logprobs)


def _check_integer(name: str, value: object, high: int) -> None:
    if not is_integer(value) or not 0 <= cast(int, value) <= high:
        raise InvalidRequestError(
            f"{name} is {show(value)}; it must be a whole number from 0 to {high}", param=name
        )


def _result(token_ids: list[int], logprobs: list[float], reason: FinishReason) -> ReferenceResult:
    return ReferenceResult(
        token_ids=tuple(token_ids), logprobs=tuple(logprobs), finish_reason=reason
    )


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """Natural log probabilities [V] of logits [V]."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def ruled_logits(
    logits: Logits, request: Request, generated: list[int], stop: AbstractSet[int]
) -> Logits:
    """Logits [V] after the request's rules, given the tokens generated so far; bans are -inf. The
    rules in order: bans (allowed tokens, bad words, `stop` before `min_tokens`), biases, then
    repetition, frequency and presence penalties."""
    params = request.params
    ruled = logits.copy()
    banned = _bad_word_ends(request, generated)
    if len(generated) < params.min_tokens:
        banned |= stop
    if params.allowed_token_ids is not None:
        banned |= set(range(len(logits))) - set(params.allowed_token_ids)
    ruled[sorted(banned)] = -np.inf
    for token_id, bias in params.biases:
        ruled[token_id] += np.float32(bias)
    repetition = np.float32(params.repetition_penalty)
    for token_id in {*request.prompt_token_ids, *generated}:
        value = ruled[token_id]
        ruled[token_id] = value / repetition if value > 0 else value * repetition
    for token_id, count in Counter(generated).items():
        ruled[token_id] -= np.float32(params.frequency_penalty) * np.float32(count)
        ruled[token_id] -= np.float32(params.presence_penalty)
    return ruled


def _bad_word_ends(request: Request, generated: list[int]) -> set[int]:
    """Of bad words whose other tokens were generated just before."""
    ends: set[int] = set()
    for *start, end in request.bad_word_token_ids:
        if generated[len(generated) - len(start) :] == start and len(start) <= len(generated):
            ends.add(end)
    return ends


def choose_token(logits: Logits, params: SamplingParams, *, seed: int, position: int) -> int:
    """From logits [V] at an absolute position."""
    if params.is_greedy:
        return int(np.argmax(logits))
    scaled = logits / np.float32(params.temperature)
    noise = gumbel_noise(seed, position, len(logits))
    return int(np.argmax(np.where(kept_tokens(scaled, params), scaled + noise, -np.inf)))


def kept_tokens(scaled: Logits, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Mask [V] of the tokens that top-n-sigma, min-p, top-k and top-p keep, in that order. Tokens
    with equal logits are kept or dropped together."""
    descending = np.sort(scaled)[::-1]
    if params.top_n_sigma > 0.0:
        deviation = np.std(descending[descending > -np.inf], dtype=np.float64)
        descending = descending[descending >= descending[0] - params.top_n_sigma * deviation]
    if params.min_p > 0.0:
        descending = descending[descending >= descending[0] + np.log(np.float32(params.min_p))]
    floor = descending[params.top_k - 1] if 0 < params.top_k <= len(descending) else descending[-1]
    mass = np.where(descending >= floor, np.exp(descending - descending[0]), 0.0)
    if params.top_p < 1.0:
        reached = np.cumsum(mass) >= params.top_p * mass.sum()
        floor = max(floor, descending[np.argmax(reached)])
    return scaled >= floor


def gumbel_noise(seed: int, position: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Gumbel noise [V] of one draw, which the device's sampler must reproduce."""
    low, high = draw_keys(np.array([seed], np.uint64), np.array([position], np.int32))[0]
    bits = np.arange(vocab_size, dtype=np.uint32) * np.uint32(0x9E3779B9) ^ low
    bits = (bits ^ (bits >> np.uint32(17))) * np.uint32(0xED5AD4BB)
    bits = (bits ^ (bits >> np.uint32(11))) + high
    bits = bits * np.uint32(0xAC4C1B51)
    bits = (bits ^ (bits >> np.uint32(15))) * np.uint32(0x31848BAB)
    bits ^= bits >> np.uint32(14)
    uniform = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    uniform = np.minimum(uniform, np.float32(1.0 - 2.0**-24))
    return -np.log(-np.log1p(-uniform))


def build_reference(
    checkpoint: Checkpoint,
    config: EngineConfig,
    *,
    max_model_len: int,
    backends: Backends = BACKENDS,
    compile_constraint: CompileConstraint | None = None,
) -> ReferenceEngine:
    """In float32. Raises CheckpointError if `max_model_len` exceeds the model's positions,
    ConfigError if the backend has no independent model."""
    if max_model_len > checkpoint.outline.max_position_embeddings:
        raise CheckpointError(
            f"max_model_len {max_model_len} is above the model's "
            f"{checkpoint.outline.max_position_embeddings} positions; lower it"
        )
    backend = find_backend(config.backend, backends)
    model = backend.load_reference(checkpoint, max_model_len)
    if model is None:
        raise ConfigError(
            f"the {resolve_backend(config.backend, backends)} backend has no independent "
            f"reference model to compare with; use --reference solo"
        )
    return ReferenceEngine(
        model,
        max_model_len=max_model_len,
        eos_token_ids=checkpoint.eos_token_ids,
        compile_constraint=compile_constraint,
        images=_images_of(checkpoint, max_model_len if isinstance(model, SeeingModel) else 0),
    )


def _images_of(checkpoint: Checkpoint, num_slots: int) -> ImageLimits | None:
    """No slots where the tokens of images attend to later ones, too: the model takes a prompt in
    chunks, and has nothing of those that follow."""
    config = checkpoint.config if checkpoint.is_known else None
    if config is None or config.vision is None or config.placeholder is None:
        return None
    num_slots = num_slots if config.vision.reach is None else 0
    return ImageLimits(token_id=config.placeholder, num_slots=num_slots)
