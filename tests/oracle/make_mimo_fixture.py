"""Writes tests/fixtures/mimo-untied-bias: a tiny random MiMo and the logits of numpy.

Run from the repository's root: .venv/bin/python -m tests.oracle.make_mimo_fixture

transformers has no MiMo; its own code is not run. `numpy_decoder` is the measure, which
`tests/checkpoint/test_numpy_decoder.py` holds to transformers on a Qwen2. The folder has what the
others have (`make_fixtures`), and in expected.npz `mtp_logits` [T, V] beside: row i predicts token
i + 2 of `token_ids`.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from tests.oracle.family_configs import SMALL
from tests.oracle.numpy_decoder import NumpyDecoder

FOLDER = Path(__file__).parent.parent / "fixtures" / "mimo-untied-bias"
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 80, 16
SEED = 41
CONFIG: dict[str, Any] = {
    **SMALL,
    "architectures": ["MiMoForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_mimo.MiMoConfig",
        "AutoModel": "modeling_mimo.MiMoModel",
        "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
    },
    "attention_bias": True,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "model_type": "mimo",
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 640000.0},
    "sliding_window": None,
    "use_sliding_window": False,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "config.json").write_text(json.dumps(CONFIG, indent=2, sort_keys=True) + "\n")
    save_file(make_tensors(), FOLDER / "model.safetensors")
    decoder = NumpyDecoder.open(FOLDER)
    prompt = np.random.default_rng(SEED).integers(0, CONFIG["vocab_size"], NUM_PROMPT_TOKENS)
    token_ids = prompt.tolist()
    for _ in range(NUM_NEW_TOKENS):
        token_ids.append(int(decoder.logits(token_ids)[-1].argmax()))
    np.savez_compressed(
        FOLDER / "expected.npz",
        token_ids=np.array(token_ids, np.int32),
        logits=decoder.logits(token_ids)[:-1].astype(np.float32),
        mtp_logits=decoder.mtp_logits(token_ids).astype(np.float32),
        num_prompt_tokens=np.int32(NUM_PROMPT_TOKENS),
    )


def make_tensors() -> dict[str, npt.NDArray[np.float32]]:
    """Random weights that make errors show: peaked attention, noisy norms and biases."""
    embed, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    vocab, head_dim = CONFIG["vocab_size"], embed // heads
    generator = np.random.default_rng(SEED)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, embed),
        "lm_head.weight": (vocab, embed),
        "model.norm.weight": (embed,),
        "model.mtp_layers.0.input_proj.weight": (embed, 2 * embed),
    }
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        shapes[f"model.mtp_layers.0.{name}.weight"] = (embed,)
    layers = [f"layers.{index}" for index in range(CONFIG["num_hidden_layers"])]
    for layer in (*layers, "mtp_layers.0"):
        inner, kv = CONFIG["intermediate_size"], CONFIG["num_key_value_heads"] * head_dim
        linears = {
            "self_attn.q_proj": (embed, embed),
            "self_attn.k_proj": (kv, embed),
            "self_attn.v_proj": (kv, embed),
            "self_attn.o_proj": (embed, embed),
            "mlp.gate_proj": (inner, embed),
            "mlp.up_proj": (inner, embed),
            "mlp.down_proj": (embed, inner),
        }
        for name, shape in linears.items():
            shapes[f"model.{layer}.{name}.weight"] = shape
            if name[-6:] in ("q_proj", "k_proj", "v_proj"):
                shapes[f"model.{layer}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.{layer}.{name}.weight"] = (embed,)
    return {name: draw(generator, name, shape) for name, shape in shapes.items()}


def draw(
    generator: np.random.Generator, name: str, shape: tuple[int, ...]
) -> npt.NDArray[np.float32]:
    noise = generator.standard_normal(shape, dtype=np.float32)
    if "norm" in name:
        return np.float32(1) + np.float32(0.2) * noise
    if name.endswith("bias"):
        return np.float32(0.2) * noise
    gain = 2.0 if "q_proj" in name else 1.0
    if "lm_head" in name:
        gain = math.sqrt(math.log(CONFIG["vocab_size"]))
    return noise * np.float32(gain / math.sqrt(shape[-1]))


if __name__ == "__main__":
    main()
