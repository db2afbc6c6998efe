"""GGUF files of hybrids: what llama.cpp's converter reorders and transforms has the same logits."""

from pathlib import Path

import numpy as np
import pytest

from cadenza.backends.xla.reference_model import ReferenceModel
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from tests.by_day import by_day
from tests.checkpoint.gguf_models import HYBRIDS, convert


def logits_of(checkpoint: Checkpoint, token_ids: list[int]) -> np.ndarray:
    model = ReferenceModel(checkpoint.config, checkpoint.weights, 64)
    model.start()
    return model.append(token_ids)


@pytest.mark.parametrize("shape", by_day(list(HYBRIDS), {"qwen3.5"}))
def test_a_file_has_the_logits_of_its_folder(tmp_path: Path, shape: str):
    conversion = convert(shape, tmp_path / "folder")
    path = conversion.write(tmp_path / "model.gguf")
    folder, file = open_checkpoint(conversion.original), open_checkpoint(path)
    assert file.config.kv_groups == folder.config.kv_groups
    assert file.config.recurrent_layers == folder.config.recurrent_layers
    ids = np.random.default_rng(0).integers(3, folder.config.vocab_size, 50).tolist()
    np.testing.assert_allclose(logits_of(file, ids), logits_of(folder, ids), atol=1e-4)
