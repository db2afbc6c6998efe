"""Sizes of the bundled model that sees."""

from dataclasses import dataclass

from training.model import ModelShape

PATCH = 12
PATCHES_OF_A_SIDE = 8
SCALE = 2
CELLS_OF_A_SIDE = PATCHES_OF_A_SIDE // SCALE
"""Patches are joined by `SCALE` x `SCALE` to a cell, which is one image token."""

VOCAB_SIZE = 528

TEXT_SHAPE = ModelShape(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=2048,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
    has_head_norms=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerShape:
    """Sizes of the tower, under the names that Hugging Face gives them."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 3
    num_attention_heads: int = 4
    layer_norm_eps: float = 1e-6
