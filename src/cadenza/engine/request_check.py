"""`RequestCheck`: whether an engine with given limits and model can ever serve a request. Needs
only limits, vocabulary size and capabilities, so that it can run outside the engine's process.
Stateless. Invariant: a request that passes is never rejected as invalid later."""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cadenza.backends.base import Capability
from cadenza.batch.whole_spans import least_budget, whole_spans_of
from cadenza.config import EngineLimits, ImageLimits
from cadenza.engine.request_stats import RequestTimes
from cadenza.errors import ContextLengthError, InvalidRequestError, show
from cadenza.request import Attachment, PoolingParams, Request
from cadenza.sparse_prefill import LOOK_AHEAD_TOKENS, SparsePrefill, kept_of_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCheck:
    """What bounds an engine's requests. `hidden_size`: of the hidden states that it gives;
    `scored_tokens`: of the longest prompt that its scorer scores; None for none."""

    limits: EngineLimits
    vocab_size: int
    backend: str
    capabilities: frozenset[Capability]
    has_priorities: bool = False
    has_constraints: bool = False
    hidden_size: int | None = None
    scored_tokens: int | None = None

    def check(self, request: Request) -> None:
        """Raises InvalidRequestError if the engine can never serve the request."""
        if not isinstance(request, Request):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequestError(
                f"what was submitted is {show(request)}; it must be a Request", param="request"
            )
        self._check_lengths(request)  # first: avoids scanning overlong input
        self._check_tokens(request)
        for name in ("logprobs", "prompt_logprobs"):
            is_asked = getattr(request.params, name) is not None
            if is_asked and "logprobs" not in self.capabilities:
                raise InvalidRequestError(
                    f"{name} are not supported by the {self.backend} backend", param=name
                )
        if request.priority and not self.has_priorities:
            raise InvalidRequestError(
                f"priority is {request.priority}, but this engine does not order requests by it; "
                f"leave it out, or start the engine with --scheduling-policy priority",
                param="priority",
            )
        for name, is_asked in (
            ("speculative", request.params.speculative),
            ("prediction", request.prediction),
        ):
            if is_asked and "drafts" not in self.capabilities:
                raise InvalidRequestError(
                    f"{name} is not supported by the {self.backend} backend, which verifies no "
                    f"drafts; leave it out",
                    param=name,
                )
        if request.pooling is not None:
            self._check_pooling(request.pooling)
        if request.attachments and "attachments" not in self.capabilities:
            raise InvalidRequestError(
                f"attachments are not supported by the {self.backend} backend; send text alone",
                param="attachments",
            )
        if request.attachments and "whole_spans" in self.capabilities:
            self._check_spans(request)
        if request.sparse_prefill is not None:
            check_sparse(
                request,
                request.sparse_prefill,
                is_supported="sparse_prompts" in self.capabilities,
                backend=self.backend,
                scored_tokens=self.scored_tokens,
            )
        images = self.limits.images
        if images is not None or request.attachments:
            check_images(request, images)

    def checked(self, given: "Request | CheckedRequest") -> "CheckedRequest":
        request = request_of(given)
        self.check(request)
        if isinstance(given, CheckedRequest):
            return replace(given, check=self)
        return CheckedRequest(request=request, check=self)

    def max_num_tokens(self, request: Request) -> int:
        """Prompt plus `max_tokens`."""
        if request.params.max_tokens is None:
            return self.limits.max_model_len
        return len(request.prompt_token_ids) + request.params.max_tokens

    def _check_spans(self, request: Request) -> None:
        limits = self.limits
        longest = max(span.stop - span.start for span in whole_spans_of(request.attachments))
        least = least_budget(longest, limits.max_num_seqs)
        if limits.max_num_batched_tokens < least:
            raise InvalidRequestError(
                f"an attachment has {longest} tokens, which one step computes with a token of each "
                f"other row, and a step has at most {limits.max_num_batched_tokens}; send a "
                f"smaller one, or start the engine with --max-num-batched-tokens {least}",
                param="attachments",
            )
        if request.params.prompt_logprobs is not None:
            raise InvalidRequestError(
                "prompt_logprobs are not supported beside attachments whose tokens see each other "
                "both ways; leave them out",
                param="prompt_logprobs",
            )

    def _check_tokens(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise InvalidRequestError("the prompt is empty; give one token or more", param="prompt")
        params = request.params
        self._check_ids("prompt", request.prompt_token_ids)
        if params.stop_token_ids:
            self._check_ids("stop_token_ids", params.stop_token_ids)
        if params.allowed_token_ids:
            self._check_ids("allowed_token_ids", params.allowed_token_ids)
        if params.logit_bias:
            self._check_ids("logit_bias", (token_id for token_id, _ in params.biases))
        if request.prediction:
            self._check_prediction(request.prediction)
        for token_ids in request.bad_word_token_ids:
            self._check_ids("bad_words", token_ids)
        self._check_resolved(request)

    def _check_resolved(self, request: Request) -> None:
        self._check_constraint(request)
        params, count = request.params, request.params.truncate_prompt_tokens
        if params.bad_words and not request.bad_word_token_ids:
            raise InvalidRequestError(
                "bad_words were not turned into tokens; give bad_word_token_ids with them, as "
                "LLM and AsyncEngine do",
                param="bad_words",
            )
        if count is not None and len(request.prompt_token_ids) > count:
            raise InvalidRequestError(
                f"the prompt has {len(request.prompt_token_ids)} tokens and "
                f"truncate_prompt_tokens is {count}; cut the prompt before it is submitted, as LLM "
                f"and AsyncEngine do",
                param="truncate_prompt_tokens",
            )

    def _check_constraint(self, request: Request) -> None:
        if request.params.structured is not None and request.constraint is None:
            raise InvalidRequestError(
                "the structured output was not turned into a constraint; give the request to LLM "
                "or AsyncEngine",
                param="structured",
            )
        constraint = request.constraint
        if constraint is not None and constraint.is_needed and not self.has_constraints:
            raise InvalidRequestError(
                "structured output is not supported by this engine, which has no tokenizer.json",
                param="structured",
            )

    def _check_pooling(self, params: PoolingParams) -> None:
        if self.hidden_size is None:
            raise InvalidRequestError(
                f"embeddings are not supported by the {self.backend} backend", param="pooling"
            )
        if params.pooling is None:
            raise InvalidRequestError(
                "pooling was not resolved; name last or mean, or give the request to LLM or "
                "AsyncEngine",
                param="pooling",
            )
        if params.dimensions is not None and params.dimensions > self.hidden_size:
            raise InvalidRequestError(
                f"dimensions is {params.dimensions}; this model's embeddings have "
                f"{self.hidden_size}",
                param="dimensions",
            )

    def _check_prediction(self, token_ids: tuple[int, ...]) -> None:
        if len(token_ids) > self.limits.max_model_len:
            raise InvalidRequestError(
                f"prediction has {len(token_ids)} tokens, more than this model's context of "
                f"{self.limits.max_model_len}; shorten it",
                param="prediction",
            )
        self._check_ids("prediction", token_ids)

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        ids = tuple(token_ids)
        if not ids or 0 <= min(ids) <= max(ids) < self.vocab_size:
            return
        odd = next(token_id for token_id in ids if not 0 <= token_id < self.vocab_size)
        raise InvalidRequestError(
            f"{name} holds the token id {show(odd)}; this model's ids go from 0 to "
            f"{self.vocab_size - 1}",
            param=name,
        )

    def _check_lengths(self, request: Request) -> None:
        num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.params.max_tokens
        least = num_prompt_tokens + (max_tokens != 0)
        wanted = max(self.max_num_tokens(request), least)
        if wanted > self.limits.max_model_len:
            raise ContextLengthError(
                prompt_length=f"{num_prompt_tokens} tokens",
                max_tokens=max_tokens,
                max_model_len=self.limits.max_model_len,
                is_prompt_alone=least > self.limits.max_model_len,
            )
        # The last generated token's KV is never computed.
        num_computed = max(wanted - 1, num_prompt_tokens)
        if request.sparse_prefill is not None and request.sparse_prefill.kept is None:
            num_computed = max(num_computed, num_prompt_tokens + LOOK_AHEAD_TOKENS)
        num_pages = -(-num_computed // self.limits.page_size)
        if num_pages > self.limits.num_pages:
            raise InvalidRequestError(
                f"the request needs {num_pages} KV pages and the pool has "
                f"{self.limits.num_pages}; shorten it, or give the engine more "
                f"--kv-cache-memory-bytes",
                param="max_tokens",
            )
        most = request.tenant.most_pages(self.limits.num_pages)
        if num_pages > most:
            raise InvalidRequestError(
                f"the request needs {num_pages} KV pages and its tenant may hold {most} of the "
                f"pool's {self.limits.num_pages}; shorten it, or raise the tenant's page_share",
                param="max_tokens",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRequest:
    """Has passed `check`, so that the engine of that check does not repeat it, which fills in
    `times`."""

    request: Request
    check: RequestCheck
    times: RequestTimes = field(default_factory=RequestTimes)


def request_of(given: Request | CheckedRequest) -> Request:
    return given.request if isinstance(given, CheckedRequest) else given


def check_sparse(
    request: Request,
    sparse: SparsePrefill,
    *,
    is_supported: bool,
    backend: str,
    scored_tokens: int | None,
) -> None:
    """Raises InvalidRequestError if the engine cannot prune the request's prompt. `scored_tokens`:
    as of `RequestCheck`."""
    if not is_supported:
        raise _refused(f"the {backend} backend was not loaded to compute prompts with gaps")
    params, num_tokens = request.params, len(request.prompt_token_ids)
    for name, is_asked in (
        ("attachments", bool(request.attachments)),
        ("pooling", request.pooling is not None),
        ("prompt_logprobs", params.prompt_logprobs is not None),
        ("repetition_penalty", params.repetition_penalty != 1.0),
    ):
        if is_asked:
            raise _refused(f"{name} needs every token of the prompt")
    if sparse.kept is not None:
        kept_of_mask(sparse.kept, num_tokens)
    elif scored_tokens is None:
        raise _refused("this engine has no model that scores prompts")
    elif num_tokens > scored_tokens:
        raise _refused(
            f"the prompt has {num_tokens} tokens, and the model that scores prompts reads at most "
            f"{scored_tokens}"
        )


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"spec_prefill: {reason}; leave spec_prefill out of this request", param="spec_prefill"
    )


CHANNELS = 3  # Bytes of a pixel


def check_images(request: Request, images: ImageLimits | None) -> None:
    """Raises InvalidRequestError."""
    if images is None:
        raise _error("this engine encodes no images (--no-images, or a model of text alone)")
    indices: list[int] = []
    if images.token_id in request.prompt_token_ids:
        ids = request.prompt_token_ids
        indices = [index for index, each in enumerate(ids) if each == images.token_id]
    num_inside = 0
    for number, part in enumerate(request.attachments, start=1):
        first, stop = bisect_left(indices, part.start), bisect_left(indices, part.end)
        _check_part(number, part, indices[first:stop])
        num_inside += stop - first
        if stop - first > images.num_slots:
            raise _error(
                f"image {number} has {stop - first} tokens and the engine has {images.num_slots} "
                f"slots for those of all images; send a smaller one, or start the engine with more "
                f"--image-cache-bytes"
            )
    allowed = request.params.allowed_token_ids
    if allowed is not None and set(allowed) == {images.token_id}:
        raise InvalidRequestError(
            f"allowed_token_ids holds the image token {images.token_id} alone, which is never "
            f"generated; allow others too",
            param="allowed_token_ids",
        )
    if num_inside < len(indices):
        raise InvalidRequestError(
            f"the prompt holds the image token {images.token_id} where there is no image; leave it "
            f"out, or send the image with it",
            param="prompt",
        )


def _check_part(number: int, part: Attachment, indices: list[int]) -> None:
    if not part.rows * part.columns == len(indices) > 0:
        raise _error(
            f"image {number} has {part.rows} x {part.columns} tokens and the prompt {len(indices)} "
            f"in its place"
        )
    if indices[0] != part.start or indices[-1] != part.end - 1:
        raise _error(f"the span of image {number} begins and ends with no token of it")
    num_bytes = part.width * part.height * CHANNELS
    if not num_bytes or len(part.payload) != num_bytes:
        raise _error(
            f"image {number} has {len(part.payload)} bytes; {part.width} x {part.height} pixels "
            f"have {num_bytes}"
        )


def _error(text: str) -> InvalidRequestError:
    return InvalidRequestError(text, param="attachments")
