"""`ReferenceEngine`: one request after the other through the plainest model and sampler there is.

No scheduler, pages, batch, prefix cache or native kernels, and its own sampler (numpy, sorting
where the engine bisects). The gate's witness: `verify` and the tests compare the engine with it.
Shares with the engine the definition of randomness (`core.draw_keys`) and what a request may ask
(`RequestCheck`), and nothing that computes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt

from cadenza.backends import BACKENDS, Backends, find_backend, resolve_backend
from cadenza.backends.base import SequenceModel
from cadenza.checkpoint import Checkpoint
from cadenza.config import MAX_SEED, EngineConfig, EngineLimits, is_integer
from cadenza.core.draw_keys import derive_sample_seed, draw_keys
from cadenza.engine.request_check import RequestCheck
from cadenza.errors import CheckpointError, ConfigError, InvalidRequestError, show
from cadenza.request import FinishReason, Request, SamplingParams, as_token_ids
from cadenza.verification.reference_rules import ruled_logits

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    """The shown tokens, the log probability of each, and why the stream ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


class ReferenceEngine:
    """Serves requests alone. `max_model_len` caps prompt and output together."""

    def __init__(
        self, model: SequenceModel, *, max_model_len: int, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self._model = model
        self._max_model_len = max_model_len
        self._check = RequestCheck(
            limits=_limits_of(max_model_len),
            vocab_size=model.vocab_size,
            backend="reference",
            capabilities=frozenset({"logprobs"}),
        )
        self._eos_token_ids = frozenset(eos_token_ids)

    def run(self, request: Request, *, seed: int | None = None, sample: int = 0) -> ReferenceResult:
        """One sample's whole stream. `seed` stands in where the request names none.

        Raises:
            InvalidRequestError: it cannot be served as written, as `EngineCore.submit`.
        """
        self._check.check(request)
        _check_whole("seed", 0 if seed is None else seed, MAX_SEED)
        params = request.params
        _check_whole("sample", sample, params.n - 1)
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
        self._model.start()
        logits = self._model.append(list(request.prompt_token_ids))
        while True:
            position = len(request.prompt_token_ids) + len(token_ids)
            ruled = ruled_logits(logits, request, token_ids, stop)
            if np.isneginf(ruled).all():
                return _result(token_ids, logprobs, "error")
            token_id = choose_token(ruled, params, seed=used_seed, position=position)
            if token_id in stop:
                break
            token_ids.append(token_id)
            logprobs.append(float(log_softmax(logits)[token_id]))
            if len(token_ids) == limit:
                break
            logits = self._model.append([token_id])
        reason: FinishReason = "length" if len(token_ids) == limit else "stop"
        return _result(token_ids, logprobs, reason)

    def score(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """The log probability of each token but the first, after those before it.

        Raises:
            InvalidRequestError: they are no tokens of the model's, or more than fit.
        """
        ids = as_token_ids("prompt", token_ids)
        for token_id in ids:
            _check_whole("a token id", token_id, self._model.vocab_size - 1)
        _check_whole("the number of tokens", len(ids), self._max_model_len)
        self._model.start()
        logprobs: list[float] = []
        for token_id, following in pairwise(ids):
            logits = self._model.append([token_id])
            logprobs.append(float(log_softmax(logits)[following]))
        return tuple(logprobs)


def _limits_of(max_model_len: int) -> EngineLimits:
    """One sequence at a time, in one piece."""
    return EngineLimits(
        max_num_seqs=1,
        max_num_batched_tokens=1,
        max_model_len=max_model_len,
        page_size=max_model_len,
        num_pages=1,
        max_num_queued_reqs=1,
    )


def _check_whole(name: str, value: object, high: int) -> None:
    if not is_integer(value) or not 0 <= cast(int, value) <= high:
        raise InvalidRequestError(
            f"{name} is {show(value)}; it must be a whole number from 0 to {high}", param=name
        )


def _result(token_ids: list[int], logprobs: list[float], reason: FinishReason) -> ReferenceResult:
    return ReferenceResult(
        token_ids=tuple(token_ids), logprobs=tuple(logprobs), finish_reason=reason
    )


def log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    """Natural-log probabilities [V]."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def choose_token(logits: Logits, params: SamplingParams, *, seed: int, position: int) -> int:
    """The token that `params` choose from logits [V] at an absolute position."""
    if params.is_greedy:
        return int(np.argmax(logits))
    scaled = logits / np.float32(params.temperature)
    noise = gumbel_noise(seed, position, len(logits))
    return int(np.argmax(np.where(kept_tokens(scaled, params), scaled + noise, -np.inf)))


def kept_tokens(scaled: Logits, params: SamplingParams) -> npt.NDArray[np.bool_]:
    """Which tokens top-n-sigma, min-p, then top-k, then top-p leave [V]; equal logits share their
    fate.
    """
    falling = np.sort(scaled)[::-1]
    if params.top_n_sigma > 0.0:
        deviation = np.std(falling[falling > -np.inf], dtype=np.float64)
        falling = falling[falling >= falling[0] - params.top_n_sigma * deviation]
    if params.min_p > 0.0:
        falling = falling[falling >= falling[0] + np.log(np.float32(params.min_p))]
    floor = falling[params.top_k - 1] if 0 < params.top_k <= len(falling) else falling[-1]
    mass = np.where(falling >= floor, np.exp(falling - falling[0]), 0.0)
    if params.top_p < 1.0:
        reached = np.cumsum(mass) >= params.top_p * mass.sum()
        floor = max(floor, falling[np.argmax(reached)])
    return scaled >= floor


def gumbel_noise(seed: int, position: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Gumbel noise [V] of one draw; the definition that the device's sampler must match."""
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
) -> ReferenceEngine:
    """The independent reference over the same checkpoint, in float32.

    Raises:
        CheckpointError: the model has fewer positions.
        ConfigError: the chosen backend has no independent model.
    """
    if max_model_len > checkpoint.config.max_position_embeddings:
        raise CheckpointError(
            f"the model has {checkpoint.config.max_position_embeddings} positions; "
            f"{max_model_len} were asked for"
        )
    backend = find_backend(config.backend, backends)
    witness = backend.load_witness(checkpoint.config, checkpoint.weights, max_model_len)
    if witness is None:
        raise ConfigError(
            f"the {resolve_backend(config.backend, backends)} backend has no independent "
            f"reference model to compare with; use --reference solo"
        )
    return ReferenceEngine(
        witness, max_model_len=max_model_len, eos_token_ids=checkpoint.eos_token_ids
    )
