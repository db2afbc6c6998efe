"""How far a model's distributions are from exact ones: `logprobs_of` and `mean_kl`.

Owns the way to the logits of every position: the decoder over the native op table, without an
engine. The measure is the mean over all positions of KL(exact ‖ other), over all of the
vocabulary, in nats.

Shapes: L tokens of a text, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.decoder import DecoderWeights, load_decoder, run_layers
from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.table import DecoderSpec, LayerPools, Linear, StepArrays
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.text import Tokenizer
from tests.contract.steps import Geometry, Stream, build_inputs
from tests.xla.test_native_ops import device_step
from training.corpus.example import Split
from training.corpus.mixture import SHARES, make_example, open_source

# The log probabilities [L, V] after each token of each text.
Logprobs = Iterable[npt.NDArray[np.floating[Any]]]

EXAMPLES = 3  # of each kind of text
PAGE_SIZE, BUCKET = 16, 256
BUNDLED = open_checkpoint(None)


class LogitOps(NativeOps):
    def next_tokens(self, x: Any, head: Linear, step: StepArrays) -> Any:
        model = self._model
        assert model.residual_scale == model.logit_divisor == 1.0
        assert model.logit_soft_cap is None
        zeros = jnp.zeros((len(x), model.vocab_size), jnp.float32)  # the sum is float32
        return self.linear(x, head, step.num_logits, zeros)


def held_out_texts() -> list[list[int]]:
    assert BUNDLED.tokenizer_source is not None
    tokenizer = Tokenizer(BUNDLED.tokenizer_source)
    found: list[list[int]] = []
    for kind in SHARES:
        for index in range(EXAMPLES):
            source = open_source(Split.HELD_OUT, "evaluate", kind, index)
            text = make_example(kind, source, max_tokens=300).text
            found.append(tokenizer.encode(text)[:BUCKET])
    return found


def logprobs_of(
    texts: Sequence[Sequence[int]],
    checkpoint: Checkpoint,
    table: type[LogitOps] = LogitOps,
    *,
    bucket: int = BUCKET,
    **settings: Any,
) -> Iterator[npt.NDArray[np.float32]]:
    """Of each text, of at most `bucket` tokens; `settings` are those of `DecoderSpec`."""
    spec = DecoderSpec(model=checkpoint.config, page_size=PAGE_SIZE, **settings)
    ops = table(spec)
    weights = load_decoder(WeightSource(ops, spec, checkpoint.weights), bucket)
    geometry = Geometry(bucket=bucket, num_rows=bucket, page_size=PAGE_SIZE)
    pages = np.arange(bucket // PAGE_SIZE, dtype=np.int32)
    table_of_rows = np.broadcast_to(pages, (bucket, len(pages)))

    @jax.jit
    def forward(weights: DecoderWeights, step: StepArrays) -> jax.Array:
        (group,) = spec.model.kv_groups
        pools = LayerPools((ops.new_kv_pool(group, len(pages), float("nan")),))
        context = StepContext.of(ops, spec, step, weights.ropes)
        hidden = run_layers(context, weights, pools).hidden
        logits = ops.next_tokens(hidden, weights.lm_head, step)
        return jax.nn.log_softmax(logits)

    for text in texts:
        stream = Stream(row=0, pages=pages.tolist())
        chunk = stream.chunk(list(text), samples=True, num_choices=len(text))
        step = device_step(build_inputs([chunk], geometry), table_of_rows)
        yield np.asarray(forward(weights, step))[: len(text)]


def kl_of_positions(
    exact: npt.NDArray[np.floating[Any]], other: npt.NDArray[np.floating[Any]]
) -> npt.NDArray[np.float64]:
    wide = exact.astype(np.float64)
    return (np.exp(wide) * (wide - other)).sum(axis=-1)


def mean_kl(exact: Logprobs, others: Logprobs) -> float:
    pairs = zip(exact, others, strict=True)
    return float(np.concatenate([kl_of_positions(p, q) for p, q in pairs]).mean())
