"""Embeddings of pooled requests, as `LLM` and `AsyncEngine` return them."""

import sys
from array import array

from cadenza.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput


def embedding_of(output: RequestOutput) -> EmbeddingRequestOutput:
    """The output of a pooled request that has finished."""
    (sample,) = output.outputs
    return EmbeddingRequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
        outputs=EmbeddingOutput(
            embedding=tuple(values_of(sample.embedding or b"")),
            finish_reason=sample.finish_reason,
            error=sample.error,
            error_kind=sample.error_kind,
        ),
    )


def values_of(embedding: bytes) -> list[float]:
    """The numbers of an embedding, which is float32 in little endian."""
    values = array("f", embedding)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
