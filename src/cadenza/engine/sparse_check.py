"""`check_sparse`: whether the prompt of a request can be thinned out.

The front end decides which prompts are, and leaves `Request.sparse_prefill` out of all others; the
engine believes none of it. Stateless.
"""

from cadenza.errors import InvalidRequestError
from cadenza.request import Request
from cadenza.sparse_prefill import SparsePrefill, kept_of_mask


def check_sparse(
    request: Request,
    sparse: SparsePrefill,
    *,
    is_supported: bool,
    backend: str,
    scored_tokens: int | None,
) -> None:
    """Raises InvalidRequestError if the engine cannot thin out the request's prompt.

    Args:
        is_supported: its runner computes such prompts.
        scored_tokens: of the longest prompt that its scorer scores; None without one.
    """
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
