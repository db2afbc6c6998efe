"""The decoder: token ids to the hidden states from which tokens are chosen. One definition covers
every model family: families differ in `ModelConfig` and in which weights are present. Legend as in
`ops.table`."""

from typing import Any, NamedTuple

import jax

from cadenza.backends.xla.layers.attention import Attention, LatentAttention
from cadenza.backends.xla.layers.feed_forward import ExpertMLP, GatedMLP, ParallelMLP
from cadenza.backends.xla.layers.layer_inputs import HiddenInput, LayerEmbedding, LayerInput
from cadenza.backends.xla.layers.recurrent import GatedDelta, SelectiveScan, ShortConv
from cadenza.backends.xla.layers.residual import Residual, StepContext
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import LayerPools, Linear
from cadenza.models.declaration import (
    declare_embedding,
    declare_final_norm,
    declare_head,
    declare_layer,
)
from cadenza.models.rope_factors import rope_factors
from cadenza.weights.tensor_spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    ExpertMLPSpec,
    GatedMLPSpec,
    LatentSpec,
    LayerSpec,
    ParallelMLPSpec,
    ScanSpec,
)

MIXERS = {
    AttentionSpec: Attention,
    LatentSpec: LatentAttention,
    DeltaSpec: GatedDelta,
    ConvSpec: ShortConv,
    ScanSpec: SelectiveScan,
}
# By the declaration of a layer's mixer, and of its MLP.
FEED_FORWARDS: dict[type, Any] = {
    GatedMLPSpec: GatedMLP,
    ExpertMLPSpec: ExpertMLP,
    ParallelMLPSpec: ParallelMLP,
}


class Layer(NamedTuple):
    """A token mixer, then a feed-forward; what the model family does not have is None."""

    mixer_norm: Any | None  # [E]
    mixer: Attention | LatentAttention | GatedDelta | ShortConv | SelectiveScan
    mixer_out: Linear  # [E, width of what the mixer gives]
    mixer_post_norm: Any | None  # [E]
    feed_forward: GatedMLP | ExpertMLP | ParallelMLP
    inputs: LayerInput | None = None

    @classmethod
    def load(cls, source: WeightSource, layer: LayerSpec) -> "Layer":
        mixer: Any = MIXERS[type(layer.mixer)]
        return source.load(
            cls,
            layer,
            mixer=mixer.load(source, layer.mixer),
            mixer_out=source.linear(layer.mixer.out),
            feed_forward=FEED_FORWARDS[type(layer.mlp)].load(source, layer),
            inputs=LayerInput.load(source, layer),
        )

    def mix(
        self, context: StepContext, index: int, stream: Residual, pools: LayerPools
    ) -> tuple[jax.Array, LayerPools]:
        normed = stream.normed(context.ops, self.mixer_norm)
        return self.mixer.mix(context, index, normed, pools)

    def append(
        self, context: StepContext, index: int, stream: Residual, pools: LayerPools
    ) -> LayerPools:
        assert isinstance(self.mixer, Attention), "the layer has keys and values of heads"
        normed = stream.normed(context.ops, self.mixer_norm)
        return self.mixer.append(context, index, normed, pools)

    def add(self, ops: OpTable, mixed: jax.Array, stream: Residual) -> Residual:
        stream = stream.plus(ops, mixed, self.mixer_out, self.mixer_post_norm)
        return self.feed_forward.add(ops, stream)


class DecoderWeights(NamedTuple):
    """`head` is None if it is tied to the embedding; `inputs` are there if the model reads hidden
    states, `layer_embedding` if it has per-layer embeddings."""

    embedding: Linear  # [V, E]
    layers: tuple[Layer, ...]
    final_norm: Any  # [E]
    head: Linear | None  # [V, E]
    ropes: tuple[Any, ...]  # [positions, rotary_dim] of each of `ModelConfig.ropes`
    inputs: HiddenInput | None = None
    layer_embedding: LayerEmbedding | None = None

    @property
    def lm_head(self) -> Linear:
        return self.embedding if self.head is None else self.head


class LayerOutputs(NamedTuple):
    """`kept`: what the model's MTP layers take of all tokens, before the final norm, float32, or
    after it, as activations (`MTPLayout.takes_normed`)."""

    hidden: jax.Array  # [L, E], after the final norm, as activations
    pools: LayerPools
    kept: jax.Array | None = None  # [T, E]


def load_decoder(source: WeightSource, max_model_len: int) -> DecoderWeights:
    """Host arrays in the op table's layouts, ready for `jax.device_put`."""
    model = source.spec.model
    embedding = source.table(declare_embedding(model))
    head = None if model.tie_word_embeddings else source.table(declare_head(model))
    return _load_rest(source, max_model_len, embedding, head)


def load_mtp_layer(
    source: WeightSource, max_model_len: int, target: DecoderWeights
) -> DecoderWeights:
    """As `load_decoder`, with the embedding and head of `target`, whose hidden states it reads."""
    return _load_rest(source, max_model_len, target.embedding, target.head)


def _load_rest(
    source: WeightSource, max_model_len: int, embedding: Linear, head: Linear | None
) -> DecoderWeights:
    model = source.spec.model
    layers = (declare_layer(model, index) for index in range(model.num_layers))
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(Layer.load(source, layer) for layer in layers),
        final_norm=source.leaf(declare_final_norm(model)),
        head=head,
        ropes=tuple(rope_factors(rope, max_model_len) for rope in model.ropes),
        inputs=HiddenInput.load(source) if model.reads_hidden else None,
        layer_embedding=None if model.layer_inputs is None else LayerEmbedding.load(source),
    )


def _num_image_parts(context: StepContext) -> int:
    vision = context.model.vision
    if vision is None or context.images is None:
        return 0
    assert vision.num_parts <= context.model.num_layers, "the last layer is for logit rows alone"
    return vision.num_parts


class DecoderStream(NamedTuple):
    """What a step's layers begin with: the residual stream, the per-layer embeddings if the model
    has them, and the parts of the images' embeddings, of which the stream has one."""

    stream: Residual
    inputs: jax.Array | None  # [T, layers P]
    num_image_parts: int

    @classmethod
    def of(
        cls, context: StepContext, weights: DecoderWeights, read_hidden: jax.Array | None = None
    ) -> "DecoderStream":
        x = _enter_stream(context, weights, read_hidden)
        stream = Residual(x, context.step.num_tokens)
        num_image_parts = 0 if read_hidden is not None else _num_image_parts(context)
        if num_image_parts:
            stream = stream.with_images(context, 0)
        embedding = weights.layer_embedding
        inputs = None if embedding is None else embedding.enter(context, stream)
        return cls(stream, inputs, num_image_parts)

    @classmethod
    def of_stream(cls, context: StepContext, stream: Residual) -> "DecoderStream":
        """After some layers of a model without per-layer embeddings."""
        return cls(stream, None, _num_image_parts(context))

    def after(
        self, context: StepContext, layer: Layer, index: int, mixed: jax.Array
    ) -> "DecoderStream":
        stream = layer.add(context.ops, mixed, self.stream)
        if layer.inputs is not None:
            assert self.inputs is not None, "the model has per-layer embeddings"
            stream = layer.inputs.add(context.ops, stream, self.inputs, index)
        if index + 1 < self.num_image_parts:
            stream = stream.with_images(context, index + 1)
        return self._replace(stream=stream)

    def logit_rows(self, context: StepContext) -> "DecoderStream":
        ops, step, inputs = context.ops, context.step, self.inputs
        return self._replace(
            stream=self.stream.logit_rows(ops, step),
            inputs=None if inputs is None else ops.take_logit_rows(inputs, step),
        )


def _enter_stream(
    context: StepContext, weights: DecoderWeights, read_hidden: jax.Array | None
) -> jax.Array:
    if read_hidden is None:
        return context.ops.embed(weights.embedding, context.step)
    assert weights.inputs is not None, "the model reads no hidden states"
    return weights.inputs.enter(context, weights.embedding, read_hidden)


def run_layers(
    context: StepContext,
    weights: DecoderWeights,
    pools: LayerPools,
    read_hidden: jax.Array | None = None,
    *,
    keeps_hidden: bool = False,
) -> LayerOutputs:
    """`keeps_hidden` computes the last layer for all tokens, which changes no bit."""
    ops, step = context.ops, context.step
    at = DecoderStream.of(context, weights, read_hidden)
    last = len(weights.layers) - 1
    for index, layer in enumerate(weights.layers):
        mixed, pools = layer.mix(context, index, at.stream, pools)
        if index == last and not keeps_hidden:
            # KV and states are written; after them only the logit rows are needed.
            mixed, at = ops.take_logit_rows(mixed, step), at.logit_rows(context)
        at = at.after(context, layer, index, mixed)
    stream = at.stream
    if not keeps_hidden:
        return LayerOutputs(stream.normed(ops, weights.final_norm), pools)
    layout = context.model.mtp_layout
    if layout is not None and layout.takes_normed:
        normed = stream.normed(ops, weights.final_norm)
        return LayerOutputs(ops.take_logit_rows(normed, step), pools, normed)
    rows = stream.logit_rows(ops, step)
    return LayerOutputs(rows.normed(ops, weights.final_norm), pools, stream.x)
