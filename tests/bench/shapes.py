"""The tiny shape that the benchmark's suites load: small, and with every operation in it."""

from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_config import RopeConfig

TINY = ModelConfig(
    family="llama",
    vocab_size=331,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0, rotary_dim=16),
    tie_word_embeddings=True,
    max_position_embeddings=512,
    dtype="bfloat16",
    eos_token_ids=(0,),
)
