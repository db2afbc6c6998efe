"""Folders of `cadenza quantize` in transformers: the same weights, and logits within what int8
activations cost.

transformers reads them with compressed-tensors. Its default, which leaves the weights compressed
until the first step, loads no asymmetric weights of any writer in compressed-tensors 0.20 (the
zero points that it allocates are not packed), so int4 is read with `dequantize`.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.quantised_folder import write_quantised_folder
from cadenza.config import Quantization
from cadenza.weights.quantised_weight import QuantisedWeight
from tests.xla.divergence import BUNDLED, held_out_texts, logprobs_of, mean_kl

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.native,
    # `dequantize` is told so; that the file's own settings count otherwise is what is wanted.
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
]

MOST_KL = 1e-3
HALF_ULP = 2.0**-11
"""Of float16, in which `dequantize` multiplies codes and scales."""

CASES: tuple[tuple[Quantization, bool], ...] = (("int8", False), ("int8", True), ("int4", True))


def load(folder: Path, *, dequantize: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        local_files_only=True,
        quantization_config=CompressedTensorsConfig(dequantize=dequantize),
    )
    return model.eval()


def logprobs(model: Any, texts: list[list[int]]) -> list[np.ndarray]:
    import torch

    with torch.inference_mode():
        each = [model(torch.tensor([text])).logits[0].double() for text in texts]
        return [torch.log_softmax(logits, dim=-1).numpy() for logits in each]


@pytest.mark.parametrize(("scheme", "dequantize"), CASES)
def test_transformers_reads_the_weights_and_gives_the_logits(
    tmp_path: Path, scheme: Quantization, dequantize: bool, capsys: pytest.CaptureFixture[str]
):
    folder = tmp_path / scheme
    write_quantised_folder(BUNDLED, folder, scheme)
    ours = open_checkpoint(folder)
    model = load(folder, dequantize=dequantize)
    texts = held_out_texts()
    theirs = logprobs(model, texts)  # the first step decompresses the weights
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        packed = set(ours.weights.quantised) - set(file.keys())  # the others are floats in the file
    largest = max(difference(model, name, ours.weights[name]) for name in packed)
    kl = mean_kl(theirs, logprobs_of(texts, ours, dtype=jnp.float32))
    with capsys.disabled():
        print(f"\n{scheme}, dequantize {dequantize}: weights {largest:.1e}, KL {kl:.2e}", end="")
    assert largest <= (HALF_ULP if dequantize else 1e-7)
    assert 1e-6 < kl < MOST_KL


def difference(model: Any, name: str, stored: QuantisedWeight) -> float:
    """The largest relative difference of an element."""
    expected = stored.dequantised()
    found = model.get_parameter(name).detach().numpy()
    assert found.shape == expected.shape
    assert ((found == 0) == (expected == 0)).all()
    return float(np.max(np.abs(found - expected) / np.maximum(np.abs(expected), 1e-30)))


def test_zero_points_off_by_one_are_noticed(tmp_path: Path):
    """The negative control."""
    folder = tmp_path / "int4"
    write_quantised_folder(BUNDLED, folder, "int4")
    ours = open_checkpoint(folder)
    name = "model.layers.1.mlp.up_proj.weight"
    stored = ours.weights[name]
    assert stored.zero_points is not None
    wrong = QuantisedWeight(
        stored.codes, stored.scales, np.minimum(stored.zero_points + 1, 15).astype(np.uint8), bits=4
    )
    model = load(folder, dequantize=True)
    found = model.get_parameter(name).detach().numpy()
    assert (np.abs(found - wrong.dequantised()) > HALF_ULP * np.abs(found)).mean() > 0.5
