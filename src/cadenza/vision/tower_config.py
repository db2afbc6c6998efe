"""`VisionConfig`: everything that the arithmetic of a vision model depends on, besides its text
model. One definition covers all families of towers. An instance is complete; defaults were filled
in when it was read. Legend: N patches of an image part, E the tower's width, D head size, M rows of
tokens."""

from dataclasses import dataclass
from typing import Literal

from cadenza.vision.processor import ImageProcessor

# Layers in which the tokens of an image attend to all of that image: all, or those with a window,
# within it
Reach = Literal["all", "windowed"]

TowerNorm = Literal["layer", "rms"]  # LayerNorm with weight and bias, or RMSNorm with a weight

# GELU by erf, its approximations by tanh and by a sigmoid, and SiLU
TowerActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]

# How a patch at (row, column) gets its embedding from a table: its own row of a square grid's
# table; four weighted rows of it, with the corners of both grids aligned; the sum of the table's
# row for its column and the one for its row
PositionRule = Literal["raster", "bilinear", "sum"]

# how the patches of a token become one row: concatenated, or their mean
Reduction = Literal["join", "average"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerNames:
    """Names of the tensors, in the Hugging Face layout: those of a SigLIP tower."""

    # of the linear of a patch's values, which may be stored as a convolution
    patch: str = "vision_tower.vision_model.embeddings.patch_embedding"
    # patch_norm, product_norm: of norms before and after that linear
    patch_norm: str = "vision_tower.patch_norm"
    product_norm: str = "vision_tower.product_norm"
    positions: str = "vision_tower.vision_model.embeddings.position_embedding.weight"
    pre_norm: str = "vision_tower.vision_model.pre_layernorm"
    post_norm: str = "vision_tower.vision_model.post_layernorm"
    # what `{layers}.0.{norm1}` and so on begin with
    layers: str = "vision_tower.vision_model.encoder.layers"
    norm1: str = "layer_norm1"
    post_norm1: str = "post_attention_layernorm"
    norm2: str = "layer_norm2"
    post_norm2: str = "post_feedforward_layernorm"
    qkv: str | None = None  # of queries, keys and values as one tensor; None if they are three
    query: str = "self_attn.q_proj"
    key: str = "self_attn.k_proj"
    value: str = "self_attn.v_proj"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    out: str = "self_attn.out_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.fc1"
    down: str = "mlp.fc2"
    # std_bias, std_scale: of what the projector's reduction gives (`TowerConfig.standardizes`)
    std_bias: str = "vision_tower.std_bias"
    std_scale: str = "vision_tower.std_scale"


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchTable:
    """Learned embeddings of the positions of patches."""

    rule: PositionRule
    # rows and columns of the grid that the table is for; with the rule "sum", its rows for each
    # axis
    side: int
    # a table with the rule "sum" is stored as [side, 2, E], not as [2, side, E]
    axes_are_inner: bool = False

    @property
    def num_rows(self) -> int:
        return 2 * self.side if self.rule == "sum" else self.side * self.side


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerRope:
    """Rotary positions of two axes in the heads of a tower. Half of a head's pairs turn by the row
    of a patch and half by its column."""

    theta: float
    # frequencies are those of the whole head, the even ones for rows and the odd ones for columns;
    # otherwise each axis has those of half a head
    alternates: bool = False
    columns_first: bool = False  # the first half of the pairs turns by the column
    # each half of a head is rotated by itself: value i of a half pairs with value i + D / 4,
    # otherwise value i of a head with value i + D / 2
    halves_are_apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerWindows:
    """Layers in which a patch attends to its own window only."""

    side: int  # of a window, in tokens; windows begin at the image's first row and column
    full_layers: tuple[int, ...]  # those that attend to the whole image


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorLinear:
    """A linear of a projector, and the activation of its output."""

    name: str
    num_out: int
    has_bias: bool = True
    activation: TowerActivation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorConfig:
    """Makes rows of the text model's width from those of a tower."""

    side: int  # side * side patches become a token, which follow each other in the tower's rows
    linears: tuple[ProjectorLinear, ...]  # one after the other
    reduction: Reduction = "join"
    norm: TowerNorm | None = None  # of its input; None for none
    norm_name: str | None = None  # of its tensors; None if it has no weights
    norm_eps: float = 1e-6
    norm_adds_one: bool = False
    norm_is_behind: bool = False  # it norms what the reduction gives, not the rows before
    # joined rows have the values of all patches for the first channel, then those for the second
    joins_channels_first: bool = False
    is_transposed: bool = False  # the last linear is stored as [in, out]

    def num_in(self, width: int) -> int:
        """The width of the reduction's output, for rows of `width`."""
        return width * self.side**2 if self.reduction == "join" else width


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """The encoder of images and the projector after it."""

    hidden_size: int  # width E of the tower's stream
    intermediate_size: int  # of its MLPs
    num_layers: int
    num_heads: int
    head_dim: int
    patch_size: int  # pixels of a patch, along each side
    # how the values of a patch are stored: (channels, height, width) of a convolution, or (values,)
    # of a linear
    patch_shape: tuple[int, ...]
    norm_eps: float  # the constant of its norms
    projector: ProjectorConfig  # of the last layer's output
    names: TowerNames = TowerNames()
    norm: TowerNorm = "layer"
    activation: TowerActivation = "gelu_tanh"
    table: PatchTable | None = None  # learned embeddings of positions; None without them
    rope: TowerRope | None = None
    windows: TowerWindows | None = None
    # deepstack_layers, deepstack: layers whose output is added to the stream of the text model's
    # first layers, and the projector of each, whose names have `{index}`
    deepstack_layers: tuple[int, ...] = ()
    deepstack: ProjectorConfig | None = None
    has_patch_bias: bool = True
    has_attention_bias: bool = True
    has_mlp_bias: bool = True
    has_patch_norms: bool = False  # LayerNorms of the values of a patch, and of their product
    # has_pre_norm, has_post_norm: norms before the first and after the last layer
    has_pre_norm: bool = False
    has_post_norm: bool = False
    # norms at the outputs of attention and MLP, before the residual sum
    has_post_norms: bool = False
    has_head_norms: bool = False  # RMS norms of each head's query and key
    norms_values: bool = False  # values have that of each head, without a weight
    is_gated: bool = False  # the MLP is gated
    attention_scale: float | None = None  # None is 1 / sqrt(head size)
    clips_linears: bool = False  # each linear of a layer has bounds of its input and output
    output_scale: float = 1.0  # factor of what the projector's reduction gives
    standardizes: bool = False  # that is then moved and scaled by stored vectors

    @property
    def patch_values(self) -> int:
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
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def merge(self) -> int:
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
    """How a model sees."""

    family: str  # the `model_type` of the whole model's config.json
    tower: TowerConfig
    processor: ImageProcessor
    image_token_id: int  # that of placeholders, which no model may generate
    # within the vocabulary; it stands for placeholders wherever a table is read by token
    fill_token_id: int
    max_part_tokens: int  # the most placeholders of an image part
    # None: the tokens of an image attend to earlier ones alone, as text does
    reach: Reach | None = None

    @property
    def whole_span(self) -> int:
        """Most tokens that attend to each other in both directions, and so are computed
        together."""
        return 0 if self.reach is None else self.max_part_tokens

    @property
    def num_parts(self) -> int:
        """Rows of the text model's width that each image token has: the first replaces an
        embedding, the others are added after the first layers."""
        return 1 + self.tower.num_deepstack

    def slot_values(self, text_width: int) -> int:
        return self.num_parts * text_width

    @property
    def max_patches(self) -> int:
        return self.max_part_tokens * self.tower.merge**2
