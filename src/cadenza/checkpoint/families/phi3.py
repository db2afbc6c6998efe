"""Phi-3, Phi-3.5 and Phi-4: Llama with fused tensors, partial rotary positions and LongRoPE.

Published files have an `auto_map` to the original code, which is not needed and never run. An
`auto_map` to any other code is refused.
"""

from dataclasses import replace

from cadenza.checkpoint.families.family import Family, refuse_other_code
from cadenza.checkpoint.families.layer_types import read_window, window_of
from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import LayerKind, ModelConfig
from cadenza.checkpoint.rope_config import LongRopeScaling
from cadenza.errors import CheckpointError

_PUBLISHED_CODE = frozenset({"configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM"})
_ORIGINAL = "original_max_position_embeddings"


def _read(raw: JsonObject, model: ModelConfig) -> ModelConfig:
    refuse_other_code(raw, "Phi-3", _PUBLISHED_CODE)
    if not isinstance(model.rope.scaling, LongRopeScaling | None):
        raise CheckpointError(
            f"{raw.where}: the rope of models of type phi3 is either default or longrope; "
            f"correct rope_scaling"
        )
    window = read_window(raw, None)
    return replace(model, layer_pattern=(LayerKind(window=window),), has_fused_tensors=True)


def _format(config: ModelConfig) -> dict[str, object]:
    values: dict[str, object] = {"sliding_window": window_of(config)}
    if isinstance(config.rope.scaling, LongRopeScaling):
        values[_ORIGINAL] = config.rope.scaling.original_max_position_embeddings
    return values


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    read=_read,
    format=_format,
    own_keys=frozenset({"sliding_window", "auto_map"}),
    has_kv_head_for_each_by_default=True,
    default_max_positions=4096,
    default_norm_eps=1e-5,
    default_original_positions=4096,
    may_be_partly_rotated=True,
    rope_aliases=(("su", "longrope"), ("yarn", "longrope")),
)
