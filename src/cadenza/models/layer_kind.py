"""What a decoder layer may be: `LayerKind`, with the shapes of its token mixer: attention, whose
keys and values, or latents of them, lie in pages, or a recurrence, whose state lies in a slot."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The heads of attention; consecutive query heads share a KV head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def query_size(self) -> int:
        """Total width of the query heads, Hq * D."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Total width of the key heads and of the value heads, Hkv * D each."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int]:
        """The heads and values of a token's keys, and of its values, in one layer."""
        return self.num_kv_heads, self.head_dim


LATENT_NORM_EPS = 1e-6  # of latents, whatever that of the model's other norms is


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Multi-head latent attention (arXiv 2405.04434): keys and values of all heads are linears of a
    latent; pages hold it and the rotated part of the key, which heads share. It is computed in the
    absorbed form, with the linears of the keys applied to the queries."""

    num_heads: int
    rank: int  # of the latent of keys and values
    # of the latent from which queries are made; None for queries of the input
    query_rank: int | None
    plain_size: int  # values of a head's query and key that are not rotated
    rotary_size: int  # those that are, which come after them
    value_size: int  # of a head's value
    # values 2 i and 2 i + 1 are rotated together, as they are stored; else i and i + rotary_size /
    # 2
    pairs_neighbours: bool = True

    @property
    def query_size(self) -> int:
        return self.plain_size + self.rotary_size

    @property
    def heads(self) -> HeadShape:
        """The heads of the absorbed form: one key for all of them."""
        return HeadShape(
            num_heads=self.num_heads, num_kv_heads=1, head_dim=self.rank + self.rotary_size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """A gated delta net (arXiv 2412.06464). `num_inputs`, here and below, are those of a channel's
    causal convolution: the token's own and those before it. Consecutive value heads share a key
    head; with `is_tiled` value head h has key head h % Hk. `has_rates`: the checkpoint has the
    rates of decay in place of ln(-rate)."""

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    num_inputs: int
    is_tiled: bool = False
    has_rates: bool = False

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_size

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_size

    @property
    def num_channels(self) -> int:
        return 2 * self.key_width + self.value_width

    @property
    def matrices(self) -> "StateMatrices | None":
        return StateMatrices(
            num_heads=self.num_value_heads, key_size=self.key_size, value_size=self.value_size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvShape:
    """A gated short convolution, as in LFM2: its state is the inputs that it still reads.
    `has_bias`: the convolution and the linears around it have one."""

    num_channels: int
    num_inputs: int
    has_bias: bool = False

    @property
    def value_width(self) -> int:
        return self.num_channels

    @property
    def matrices(self) -> "StateMatrices | None":
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanShape:
    """A selective scan with one decay a head: Mamba-2 (arXiv 2405.21060). Consecutive heads share a
    group, which has their key B and their query C. `has_rates` as in `DeltaShape`."""

    num_heads: int
    num_groups: int
    key_size: int
    value_size: int
    num_inputs: int
    has_conv_bias: bool = True
    has_bias: bool = False
    has_rates: bool = False

    @property
    def group_width(self) -> int:
        """Of the keys of all groups, and of their queries."""
        return self.num_groups * self.key_size

    @property
    def value_width(self) -> int:
        return self.num_heads * self.value_size

    @property
    def num_channels(self) -> int:
        return self.value_width + 2 * self.group_width

    @property
    def matrices(self) -> "StateMatrices | None":
        return StateMatrices(
            num_heads=self.num_heads, key_size=self.key_size, value_size=self.value_size
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateMatrices:
    """The recurrent state of a layer: a float32 matrix of keys by values for each head."""

    num_heads: int
    key_size: int
    value_size: int

    @property
    def num_elements(self) -> int:
        return self.num_heads * self.key_size * self.value_size


# A token mixer with a state: a causal depthwise convolution of `num_channels` channels, whose
# newest `num_inputs` - 1 inputs are kept in the type of the activations; `matrices`, if any; and an
# output of `value_width`
Recurrence = DeltaShape | ConvShape | ScanShape


def state_bytes_of(shape: Recurrence, item_bytes: int) -> int:
    """Bytes of the state of one layer, with activations of `item_bytes` each."""
    inputs = (shape.num_inputs - 1) * shape.num_channels * item_bytes
    matrices = shape.matrices
    return inputs + (0 if matrices is None else 4 * matrices.num_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """The kind of a layer."""

    window: int | None = None  # of attention, in tokens; None for full attention
    has_rope: bool = True  # whether attention applies rotary positions
    has_experts: bool = False  # whether the MLP is a mixture of experts
    heads: HeadShape | None = None  # of attention, where they are not the model's
    # the earlier layer whose keys and values attention reads; it has none of its own
    kv_source: int | None = None
    # attention has no projection of values; its values are made of the keys as they are projected,
    # before their norm and rotation
    keys_are_values: bool = False
    intermediate_size: int | None = None  # width of the MLP, where it is not the model's
    latent: LatentShape | None = None  # attention over latents in place of keys and values
    # the recurrence that is the token mixer in place of attention
    recurrence: Recurrence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers whose keys and values have one shape, and one pool; all groups share page tables.
    `layers` are ascending; a layer's index in it is its index in the pool. Without `has_values`,
    values are parts of the keys (`LatentShape`)."""

    num_kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
    has_values: bool = True
