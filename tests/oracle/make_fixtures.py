"""Writes tests/fixtures: tiny random checkpoints and the logits that transformers gives for them.

Run from the repository's root, in the environment that `make oracle` uses:

    .venv-oracle/bin/python -m tests.oracle.make_fixtures [NAME...]

Each folder holds what transformers saved (config.json, model.safetensors) and expected.npz:
`token_ids` [T + 1], the prompt and greedy tokens; `logits` [T, V], float32, row i predicts token
i + 1; `num_prompt_tokens`. The shapes are hostile: three layers or more, grouped heads, odd
vocabularies, hidden sizes that are no multiple of 64, contexts beyond the scaled rotary length and
beyond every window, caps that bite.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.oracle.family_configs import FAMILY_CONFIGS
from tests.oracle.hf import compute_logits, decode_greedily

FIXTURES = Path(__file__).parent.parent / "fixtures"
NUM_PROMPT_TOKENS = 80
NUM_NEW_TOKENS = 16
MAX_TOTAL_BYTES = 16_000_000

COMMON = {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}

GAINS = {"q_proj": 2.0, "q_b_proj": 2.0, "qkv_proj": 1.5, "clamped": 8.0}
"""Of weights, so that attention is peaked, and the bounds of gates bend."""

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-untied-bias-llama3": {
        "model_type": "llama",
        "vocab_size": 331,
        "hidden_size": 42,
        "intermediate_size": 56,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama-tied-linear": {
        "model_type": "llama",
        "vocab_size": 331,
        "hidden_size": 54,
        "intermediate_size": 60,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    },
    "qwen3-tied": {
        "model_type": "qwen3",
        "vocab_size": 1003,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_attention_heads": 4,
        "head_dim": 80,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3-untied-bias": {
        "model_type": "qwen3",
        "vocab_size": 331,
        "hidden_size": 54,
        "intermediate_size": 72,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    **FAMILY_CONFIGS,
}

OLD_SPELLING = ("llama-tied-linear", "phi3-tied-partial", "gemma3-tied")
"""These folders' config.json is rewritten as transformers wrote it before version 5."""


def main(names: list[str]) -> None:
    for seed, name in enumerate(CONFIGS):
        if names and name not in names:
            continue
        folder = FIXTURES / name
        folder.mkdir(parents=True, exist_ok=True)
        write_checkpoint(folder, {**COMMON, **CONFIGS[name]}, seed)
        if name in OLD_SPELLING:
            rewrite_in_old_spelling(folder / "config.json")
        write_expected(folder, CONFIGS[name]["vocab_size"], seed)
    total = sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file())
    if total > MAX_TOTAL_BYTES:
        raise SystemExit(f"the fixtures have {total} bytes; at most {MAX_TOTAL_BYTES} are allowed")
    print(f"{len(names or CONFIGS)} fixtures written; all have {total} bytes")


def write_checkpoint(folder: Path, options: dict[str, Any], seed: int) -> None:
    """A model of transformers' own, with weights that make errors show, saved by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(options)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    logit_sigma = math.sqrt(math.log(config.vocab_size)) * getattr(config, "logits_scaling", 1.0)
    adds_one = config.model_type.startswith(("gemma2", "gemma3", "qwen3_5"))
    final_gain = final_gain_of(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                gain = final_gain if name == "model.norm.weight" else 1.0
                less = float(adds_one and "linear_attn" not in name)
                parameter.copy_(gain * (1 + 0.2 * noise) - less)
            elif name.endswith("A_log"):
                parameter.copy_(noise - 3.0)
            elif name.endswith((".D", "scale")):
                parameter.copy_(1 + 0.2 * noise)
            elif "embed_tokens_per_layer" in name:
                parameter.copy_(noise / math.sqrt(config.hidden_size_per_layer_input))
            elif name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif name.endswith("sinks"):
                parameter.copy_(2.0 + noise)
            else:
                is_head = "lm_head" in name or "embed" in name
                gain = (
                    logit_sigma / final_gain
                    if is_head
                    else GAINS.get(gain_name(name, config.model_type), 1.0)
                )
                parameter.copy_(noise * gain / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(1 + 0.2 * torch.randn(1, generator=generator))
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def gain_name(parameter: str, model_type: str) -> str:
    """The module, or `clamped` for gates that are bounded."""
    *_, module, own = parameter.split(".")
    return "clamped" if model_type == "gpt_oss" and own == "gate_up_proj" else module


def final_gain_of(config: Any) -> float:
    """Of the last norm where a scaled, tied embedding is made small in exchange, so that a token
    does not predict itself.
    """
    if not config.tie_word_embeddings:
        return 1.0
    if config.model_type.startswith("gemma"):
        return config.hidden_size**0.5
    scale = getattr(config, "embedding_multiplier", 1.0) * getattr(config, "logits_scaling", 1.0)
    return scale / getattr(config, "residual_multiplier", 1.0)


def rewrite_in_old_spelling(path: Path) -> None:
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    type_key = "type"
    if "sliding_attention" in rope:  # Gemma 3, which was never written with a mere "type"
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope, type_key = rope["full_attention"], "rope_type"
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {type_key: rope.pop("rope_type"), **rope}
    if share := config["rope_scaling"].pop("partial_rotary_factor", None):
        config["partial_rotary_factor"] = share
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_expected(folder: Path, vocab_size: int, seed: int) -> None:
    prompt = np.random.default_rng(seed).integers(0, vocab_size, NUM_PROMPT_TOKENS).tolist()
    token_ids, logits = decode_greedily(folder, prompt, NUM_NEW_TOKENS)
    check_against_one_pass(folder, token_ids, logits)
    np.savez_compressed(
        folder / "expected.npz",
        token_ids=np.array(token_ids, dtype=np.int32),
        logits=logits,
        num_prompt_tokens=np.int32(NUM_PROMPT_TOKENS),
    )


def check_against_one_pass(folder: Path, token_ids: list[int], logits: np.ndarray) -> None:
    """The oracle must agree with itself before anything is compared with it."""
    error = np.abs(compute_logits(folder, token_ids[:-1]) - logits).max()
    if error > 1e-5 * np.ptp(logits):
        raise SystemExit(f"{folder.name}: step by step and in one pass differ by {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
