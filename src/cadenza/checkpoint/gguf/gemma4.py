"""What llama.cpp's converter writes of Gemma 4 (conversion/gemma.py, src/models/gemma4.cpp):
`gemma4_entries`. The metadata's own numbers are those of full layers; windowed layers have keys
with `_swa`. The pairs of full layers that do not rotate have a frequency factor of 1e30."""

from cadenza.checkpoint.gguf.settings import Row, Settings
from cadenza.errors import CheckpointError
from cadenza.models.families.family import FULL, SLIDING
from cadenza.models.model_config import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
)
from cadenza.models.rope_config import (
    ProportionalRopeScaling,
    RopeConfig,
    format_rope,
)

ROPE_FREQUENCIES = "rope_freqs.weight"
LAYER_EMBEDDING = "per_layer_token_embd.weight"

_FULL_THETA, _SLIDING_THETA = 1_000_000.0, 10_000.0
_STANDSTILL = 1e20  # a pair whose frequency is divided by this does not turn within any context


GEMMA4_KEYS = frozenset(
    {"attention.sliding_window_pattern", "rope.freq_base_swa", "rope.dimension_count_swa"}
    | {"attention.key_length_swa", "attention.value_length_swa"}
)


def gemma4_entries(settings: Settings, _rope: RopeConfig) -> dict[str, object]:
    """The entries of config.json that no single key has."""
    num_layers = settings.integer("block_count", 1, MAX_LAYERS)
    are_sliding = settings.flags_of_layers("attention.sliding_window_pattern", num_layers)
    types = [SLIDING if is_sliding else FULL for is_sliding in are_sliding]
    num_shared = settings.integer("attention.shared_kv_layers", 0, num_layers)
    own = [index for index in range(num_layers - num_shared) if types[index] == FULL]
    tensors = settings.tensors
    table = tensors.get(LAYER_EMBEDDING)
    return {
        "layer_types": types,
        **_gemma4_heads(settings, types),
        "attention_k_eq_v": any(f"blk.{index}.attn_v.weight" not in tensors for index in own),
        "use_double_wide_mlp": _is_double_wide(settings, num_layers, num_shared),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        **_gemma4_experts(settings),
    }


def _gemma4_heads(settings: Settings, types: list[str]) -> dict[str, object]:
    """Heads and ropes of both types of layers; the metadata's own are those of full layers."""
    full_dim = settings.integer("attention.key_length", 2, MAX_HEAD_DIM)
    size = settings.integer("attention.key_length_swa", 2, MAX_HEAD_DIM, full_dim)
    for key in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if settings.integer(key, 1, MAX_HEAD_DIM, size) != size:
            raise settings.wrong(key, f"{size}, like attention.key_length_swa")
    sliding = types.index(SLIDING) if SLIDING in types else len(types) - 1
    counts = [
        settings.integer_of_layer("attention.head_count_kv", index, (1, MAX_HEADS))
        for index in (sliding, len(types) - 1)
    ]
    theta = settings.number("rope.freq_base_swa", 1.0, 1e15, _SLIDING_THETA)
    full = RopeConfig(
        theta=settings.number("rope.freq_base", 1.0, 1e15, _FULL_THETA),
        rotary_dim=full_dim,
        scaling=ProportionalRopeScaling(num_pairs=_rotated_pairs(settings, full_dim), factor=1.0),
    )
    return {
        "head_dim": size,
        "num_key_value_heads": counts[0],
        "global_head_dim": full_dim,
        "num_global_key_value_heads": counts[1],
        "rope_parameters": {
            FULL: format_rope(full, full_dim),
            SLIDING: format_rope(RopeConfig(theta=theta, rotary_dim=size), size),
        },
    }


def _rotated_pairs(settings: Settings, head_dim: int) -> int:
    """Those whose frequency is not divided; the others' factor is so large that they stand
    still."""
    factors = settings.factors(ROPE_FREQUENCIES, head_dim // 2)
    if factors is None:
        return head_dim // 2
    count = sum(factor == 1.0 for factor in factors)
    if any(factor != 1.0 for factor in factors[:count]) or any(
        factor < _STANDSTILL for factor in factors[count:]
    ):
        raise CheckpointError(
            f"{settings.metadata.where}: tensor {ROPE_FREQUENCIES} divides frequencies otherwise "
            f"than by 1 and, after those, by {_STANDSTILL:g} or more; convert the model again"
        )
    return count


def _is_double_wide(settings: Settings, num_layers: int, num_shared: int) -> bool:
    """Whether layers without keys of their own have an MLP of twice the width of the others'."""
    key, bounds = "feed_forward_length", (1, 2 * MAX_WIDTH)
    widths = [settings.integer_of_layer(key, index, bounds) for index in range(num_layers)]
    is_wide = widths[-1] == 2 * widths[0]
    last = widths[0] * (1 + is_wide)
    if widths != [widths[0]] * (num_layers - num_shared) + [last] * num_shared:
        raise settings.wrong(
            key, "one width, or twice that in the layers of attention.shared_kv_layers"
        )
    return is_wide


_EXPERTS = (
    Row("num_experts", "expert_count", 1, MAX_EXPERTS),
    Row("top_k_experts", "expert_used_count", 1, MAX_EXPERTS),
    Row("moe_intermediate_size", "expert_feed_forward_length", 1, MAX_WIDTH),
)


def _gemma4_experts(settings: Settings) -> dict[str, object]:
    has_experts = settings.integer("expert_count", 0, MAX_EXPERTS, 0) > 0
    return {"enable_moe_block": True, **settings.entries(_EXPERTS)} if has_experts else {}
