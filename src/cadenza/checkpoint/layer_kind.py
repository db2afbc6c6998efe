"""What a decoder layer may be: `LayerKind`, with the shapes of its token mixer.

Owns the geometry of keys, values and recurrent states; no tensor names. A token mixer is attention,
whose keys and values lie in pages, or a recurrence, whose state lies in a slot.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """A gated delta net (arXiv 2412.06464).

    `num_inputs` are those of the causal convolution: the token's own and those before it.
    Consecutive value heads share a key head; with `is_tiled` value head h has key head h % Hk.
    `has_rates`: the checkpoint has the rates of decay in place of ln(-rate).
    """

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
    def num_kept_inputs(self) -> int:
        """Elements of the convolution's state, in the type of the activations."""
        return (self.num_inputs - 1) * self.num_channels

    @property
    def num_state_elements(self) -> int:
        """Elements of the recurrent state, float32."""
        return self.num_value_heads * self.key_size * self.value_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """The kind of a layer.

    Args:
        window: of attention, in tokens; None for full attention.
        has_rope: whether attention applies rotary positions.
        has_experts: whether the MLP is a mixture of experts.
        heads: of attention, where they are not the model's.
        recurrence: the recurrence that is the token mixer in place of attention.
    """

    window: int | None = None
    has_rope: bool = True
    has_experts: bool = False
    heads: HeadShape | None = None
    recurrence: DeltaShape | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers whose keys and values have one shape, and one pool; all groups share page tables.

    `layers` are ascending; a layer's place in it is its place in the pool.
    """

    num_kv_heads: int
    head_dim: int
    layers: tuple[int, ...]
