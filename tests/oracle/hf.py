"""Results of transformers for a model folder: the expected side of every comparison.

Owns the settings under which transformers is exact enough to be an oracle (float32, plain
attention, experts one after another). Knows nothing of Cadenza. torch and transformers are imported
inside the functions, so that tests that need neither can be collected without them.
"""

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Float32Array = npt.NDArray[np.float32]


def load_config(folder: Path) -> Any:
    """transformers' config of a folder. It has no MiMo, whose decoder is a Qwen2."""
    from transformers import AutoConfig

    values = json.loads((folder / "config.json").read_text())
    if values["model_type"] != "mimo":
        return AutoConfig.from_pretrained(folder)
    own = ("model_type", "architectures", "auto_map")
    shared = {key: value for key, value in values.items() if key not in own}
    return AutoConfig.for_model("qwen2", **shared)


def load_model(folder: Path, dtype: str = "float32") -> Any:
    """transformers' model of a folder, in evaluation mode, with its weights in `dtype`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        config=load_config(folder),
        dtype=getattr(torch, dtype),
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
    )
    return model.eval()


def compute_logits(folder: Path, token_ids: Sequence[int]) -> Float32Array:
    """Float32 logits [T, V] of one sequence: row i predicts token i + 1."""
    import torch

    model = load_model(folder)
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).logits[0].float().numpy()


def compute_hidden_states(folder: Path, token_ids: Sequence[int]) -> Float32Array:
    """Float32 hidden states [T, E] of one sequence after the final norm."""
    import torch

    model = load_model(folder).base_model
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).last_hidden_state[0].float().numpy()


def decode_greedily(
    folder: Path, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], Float32Array]:
    """The prompt and `num_tokens` greedy tokens, and the logits [T, V] before each next token.

    Computed step by step over transformers' own KV cache; an end-of-sequence token does not stop
    it. T is all tokens but the last.
    """
    import torch

    model = load_model(folder)
    token_ids = list(prompt)
    # Newer versions have another name for it.
    names = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"
    new_ids, cache, rows = token_ids, None, []
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = model(torch.tensor([new_ids]), use_cache=True, **{cache_name: cache})
            rows.append(output.logits[0].float().numpy())
            cache = getattr(output, cache_name)
            new_ids = [int(rows[-1][-1].argmax())]
            token_ids += new_ids
    return token_ids, np.concatenate(rows)
