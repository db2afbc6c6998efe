"""`Family`: what one `model_type` says in its config.json beyond what all say.

Owns the form of a family, and nothing of any. Invariant: `read` gets a model that has everything
the files of all families state alike, and returns it with the family's own arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass

from cadenza.checkpoint.json_object import JsonObject
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.rope_config import RopeConfig, RopeRules, read_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One kind of model. Defaults are what transformers takes where the file is silent.

    Args:
        read: the file's own settings, over the shared ones that were read already.
        format: the keys that `read` needs, to be written beside the shared ones.
        own_keys: settings that `read` takes care of; others that change the arithmetic are refused.
        read_rope: of the layers without a window.
        default_head_dim: None is `hidden_size / num_attention_heads`.
        default_original_positions: see `RopeRules.default_original`.
        rope_aliases: other names of a rope type in this family's files.
    """

    model_type: str
    architecture: str
    read: Callable[[JsonObject, ModelConfig], ModelConfig]
    format: Callable[[ModelConfig], dict[str, object]]
    own_keys: frozenset[str] = frozenset()
    read_rope: Callable[[JsonObject, RopeRules], RopeConfig] = read_rope
    default_head_dim: int | None = None
    has_kv_head_for_each_by_default: bool = False
    default_max_positions: int
    default_norm_eps: float = 1e-6
    default_rope_theta: float = 10_000.0
    default_original_positions: int | None = None
    may_be_partly_rotated: bool = False
    rope_aliases: tuple[tuple[str, str], ...] = ()
    activation_key: str = "hidden_act"
    default_activation: str = "silu"
    ties_by_default: bool = False
