"""`VisionConfig`: everything that the arithmetic of a model that sees depends on, besides its text.

One definition covers all families of towers: fields say in what they differ. Invariant: an instance
is complete; what a file leaves out was filled in when it was read.

Legend: N patches of an image part, E the tower's width, D head size, M rows of tokens.
"""

from dataclasses import dataclass
from typing import Literal

from cadenza.vision.processor import ImageProcessor

Reach = Literal["all", "windowed"]
"""Layers in which the tokens of an image attend to all of that image: all, or those with a window,
within it."""

TowerNorm = Literal["layer", "rms"]
"""LayerNorm with weight and bias, or RMSNorm with a weight."""

TowerActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
"""GELU by erf, its approximations by tanh and by a sigmoid, and SiLU."""

PositionRule = Literal["raster", "bilinear", "sum"]
"""How a patch at (row, column) gets its embedding from a table: its own row of a table for a square
grid; four rows of such a table, weighted, with the corners of both grids aligned; the sum of the
row of a table for its column and one for its row."""

Reduction = Literal["join", "average"]
"""How the patches of a token become one row: one behind the other, or their mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerNames:
    """Names of the tensors, in the Hugging Face layout: those of a SigLIP tower.

    Args:
        patch: of the linear of a patch's values, which may be stored as a convolution.
        patch_norm, product_norm: of norms before and behind that linear.
        std_bias, std_scale: of what the projector's reduction gives (`TowerConfig.standardizes`).
        layers: what `{layers}.0.{norm1}` and so on begin with.
        qkv: of queries, keys and values as one tensor; None if they are three.
    """

    patch: str = "vision_tower.vision_model.embeddings.patch_embedding"
    patch_norm: str = "vision_tower.patch_norm"
    product_norm: str = "vision_tower.product_norm"
    positions: str = "vision_tower.vision_model.embeddings.position_embedding.weight"
    pre_norm: str = "vision_tower.vision_model.pre_layernorm"
    post_norm: str = "vision_tower.vision_model.post_layernorm"
    layers: str = "vision_tower.vision_model.encoder.layers"
    norm1: str = "layer_norm1"
    post_norm1: str = "post_attention_layernorm"
    norm2: str = "layer_norm2"
    post_norm2: str = "post_feedforward_layernorm"
    qkv: str | None = None
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    out: str = "self_attn.out_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.fc1"
    down: str = "mlp.fc2"
    std_bias: str = "vision_tower.std_bias"
    std_scale: str = "vision_tower.std_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchTable:
    """Learned embeddings of the positions of patches.

    Args:
        side: rows and columns of the grid that the table is for; with the rule "sum", its rows for
            each axis.
        axes_are_inner: a table with the rule "sum" is stored as [side, 2, E], not as [2, side, E].
    """

    rule: PositionRule
    side: int
    axes_are_inner: bool = False

    @property
    def num_rows(self) -> int:
        return 2 * self.side if self.rule == "sum" else self.side * self.side


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerRope:
    """Rotary positions of two axes in the heads of a tower.

    Half of a head's pairs turn by the row of a patch and half by its column.

    Args:
        alternates: frequencies are those of the whole head, the even ones for rows and the odd ones
            for columns; otherwise each axis has those of half a head.
        columns_first: the first half of the pairs turns by the column.
        halves_are_apart: each half of a head is rotated by itself: value i of a half pairs with
            value i + D / 4, otherwise value i of a head with value i + D / 2.
    """

    theta: float
    alternates: bool = False
    columns_first: bool = False
    halves_are_apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerWindows:
    """Layers in which a patch attends to those of its window alone.

    Args:
        side: of a window, in tokens; windows begin at the image's first row and column.
        full_layers: those that attend to the whole image.
    """

    side: int
    full_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorLinear:
    """A linear of a projector, and the activation of its output."""

    name: str
    num_out: int
    has_bias: bool = True
    activation: TowerActivation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorConfig:
    """What makes rows of the text model's width of those of a tower.

    Args:
        side: side * side patches become a token, which follow each other in the tower's rows.
        linears: one after the other.
        norm: of its input; None for none.
        norm_name: of its tensors; None if it has no weights.
        norm_is_behind: it norms what the reduction gives, not the rows before.
        joins_channels_first: joined rows have the values of all patches for the first channel, then
            those for the second.
        is_transposed: the last linear is stored as [in, out].
    """

    side: int
    linears: tuple[ProjectorLinear, ...]
    reduction: Reduction = "join"
    norm: TowerNorm | None = None
    norm_name: str | None = None
    norm_eps: float = 1e-6
    norm_adds_one: bool = False
    norm_is_behind: bool = False
    joins_channels_first: bool = False
    is_transposed: bool = False

    def num_in(self, width: int) -> int:
        """Values of what the reduction gives, for rows of `width`."""
        return width * self.side**2 if self.reduction == "join" else width


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """The encoder of images and the projector behind it.

    Args:
        hidden_size: width E of the tower's stream.
        intermediate_size: of its MLPs.
        patch_size: pixels of a patch, along each side.
        patch_shape: how the values of a patch are stored: (channels, height, width) of a
            convolution, or (values,) of a linear.
        norm_eps: the constant of its norms.
        projector: of the last layer's output.
        deepstack_layers, deepstack: layers whose output is added to the stream of the text model's
            first layers, and the projector of each, whose names have `{index}`.
        table: learned embeddings of positions; None without them.
        has_patch_norms: LayerNorms of the values of a patch, and of their product.
        has_pre_norm, has_post_norm: norms before the first and behind the last layer.
        has_post_norms: norms at the outputs of attention and MLP, before the residual sum.
        has_head_norms: RMS norms of each head's query and key.
        norms_values: values have that of each head, without a weight.
        is_gated: the MLP is gated.
        attention_scale: None is 1 / sqrt(head size).
        clips_linears: each linear of a layer has bounds of its input and output.
        output_scale: factor of what the projector's reduction gives.
        standardizes: that is then moved and scaled by stored vectors.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: int
    patch_shape: tuple[int, ...]
    norm_eps: float
    projector: ProjectorConfig
    names: TowerNames = TowerNames()
    norm: TowerNorm = "layer"
    activation: TowerActivation = "gelu_tanh"
    table: PatchTable | None = None
    rope: TowerRope | None = None
    windows: TowerWindows | None = None
    deepstack_layers: tuple[int, ...] = ()
    deepstack: ProjectorConfig | None = None
    has_patch_bias: bool = True
    has_attention_bias: bool = True
    has_mlp_bias: bool = True
    has_patch_norms: bool = False
    has_pre_norm: bool = False
    has_post_norm: bool = False
    has_post_norms: bool = False
    has_head_norms: bool = False
    norms_values: bool = False
    is_gated: bool = False
    attention_scale: float | None = None
    clips_linears: bool = False
    output_scale: float = 1.0
    standardizes: bool = False

    @property
    def patch_values(self) -> int:
        """Values of a patch."""
        count = 1
        for size in self.patch_shape:
            count *= size
        return count

    @property
    def attention_size(self) -> int:
        """H D: the width of all queries, keys or values of a patch."""
        return self.num_heads * self.head_dim

    @property
    def scale(self) -> float:
        """The factor of the attention scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def merge(self) -> int:
        """Patches of a token, along each side."""
        return self.projector.side

    @property
    def num_deepstack(self) -> int:
        return len(self.deepstack_layers)

    @property
    def projectors(self) -> tuple[ProjectorConfig, ...]:
        """The main one, then those of `deepstack_layers`."""
        deepstack = () if self.deepstack is None else (self.deepstack,) * self.num_deepstack
        return self.projector, *deepstack


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """How a model sees.

    Args:
        family: the `model_type` of the whole model's config.json.
        image_token_id: that of placeholders, which no model may generate.
        fill_token_id: within the vocabulary; it stands for placeholders wherever a table is read by
            token.
        max_part_tokens: the most placeholders of an image part.
        reach: None: the tokens of an image attend to earlier ones alone, as text does.
    """

    family: str
    tower: TowerConfig
    processor: ImageProcessor
    image_token_id: int
    fill_token_id: int
    max_part_tokens: int
    reach: Reach | None = None

    @property
    def whole_span(self) -> int:
        """Tokens, at most, that see each other both ways, and so are computed together."""
        return 0 if self.reach is None else self.max_part_tokens

    @property
    def num_parts(self) -> int:
        """Rows of the text model's width that each image token has: the first takes the place of an
        embedding, the others are added behind the first layers."""
        return 1 + self.tower.num_deepstack

    def slot_values(self, text_width: int) -> int:
        """Values of an image slot, for a text model of a width."""
        return self.num_parts * text_width

    @property
    def max_patches(self) -> int:
        """The most patches of an image part."""
        return self.max_part_tokens * self.tower.merge**2
