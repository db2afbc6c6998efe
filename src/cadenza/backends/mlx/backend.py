"""`MlxBackend`: `backends.base.Backend` on MLX, over mlx-lm's models. Imports MLX and mlx-lm only
when it is asked for a device, so that a missing installation is explained."""

import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec

from cadenza.backends.base import Backend, BackendTraits, Runner, RunnerSetup, SequenceModel
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import Ops
from cadenza.errors import CheckpointError, ConfigError
from cadenza.weights.weight_format import WeightDType

DTYPES: tuple[WeightDType, ...] = ("float32", "bfloat16", "float16")

MAX_NUM_BATCHED_TOKENS = 512

# Attention always covers a slot's whole capacity, so that its arithmetic does not depend on other
# requests. A longer context costs time in every step and must be asked for with --max-model-len.
DEFAULT_MAX_MODEL_LEN = 4096

# MLX's CPU kernels sum over positions in order, independent of their number; prompts are cut into
# calls of 64 tokens. The kernels are slow, so `verify` plays no longer prompts than it must.
CPU_SPAN = 64

GPU_SPAN = 512  # Metal's and CUDA's kernels are chosen by the size of a call, too

# Of the packages themselves: it works wherever this package was installed from.
_INSTALL = f"pip install {'mlx[cpu]' if sys.platform == 'linux' else 'mlx'!r} mlx-lm"

UNWRITTEN_FILL = 1000.0  # a large number: MLX multiplies masked values by 0, which would spread NaN


class MlxBackend(Backend):
    """Apple's GPUs, and MLX's CPU and CUDA builds. `find` looks an installed package up."""

    def __init__(self, find: Callable[[str], object | None] = find_spec) -> None:
        self._find = find

    def describe(self, device: str, ops: Ops, checkpoint: Checkpoint) -> BackendTraits:
        self._check_installed()
        from cadenza.backends.mlx.device import find_mlx_device
        from cadenza.backends.mlx.probe import measure_model
        from cadenza.backends.mlx.slot_model import CHUNK

        if ops != "auto":
            raise ConfigError(f"--ops {ops}: the mlx backend has one implementation; use auto")
        if checkpoint.format == "gguf":
            raise CheckpointError(
                "the mlx backend reads folders with config.json and safetensors weights, not GGUF "
                "files; choose another --backend, or an MLX checkpoint of the model"
            )
        found = find_mlx_device(device)
        measured = measure_model(checkpoint.folder, checkpoint.outline.vocab_size, DTYPES)
        return BackendTraits(
            name=f"mlx:{found.name}",
            ops="mlx-lm",
            exactness="bitwise" if found.name == "cpu" else "token",
            dtypes=DTYPES,
            dtype_for={each: each for each in DTYPES},
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            device_memory_bytes=found.memory_bytes,
            device_total_bytes=found.memory_bytes,
            kv_layouts=("dense",),
            default_max_model_len=DEFAULT_MAX_MODEL_LEN,
            unwritten_fill=UNWRITTEN_FILL,
            slot_unit=CHUNK if measured.depends_on_cuts else 1,
            memory=measured.memory,
            attention_span=CPU_SPAN if found.name == "cpu" else GPU_SPAN,
            # A recurrent state cannot go back, and Metal's bits depend on a call's size.
            capabilities=frozenset(),
        )

    def describe_arithmetic(
        self,
        device: str,
        ops: Ops,  # noqa: ARG002 (there is one implementation)
        checkpoint: Checkpoint,  # noqa: ARG002 (the versions decide for all of them)
    ) -> tuple[str, ...]:
        self._check_installed()
        from cadenza.backends.mlx.device import find_mlx_device

        versions = (version("mlx"), version("mlx-lm"))
        return (*versions, *find_mlx_device(device).described)

    def load_runner(self, checkpoint: Checkpoint, setup: RunnerSetup) -> Runner:
        self._check_installed()
        from cadenza.backends.mlx.runner import MlxRunner

        return MlxRunner(checkpoint.folder, checkpoint.outline.vocab_size, setup)

    def load_reference(self, checkpoint: Checkpoint, max_model_len: int) -> SequenceModel | None:  # noqa: ARG002 (its caches grow)
        self._check_installed()
        from cadenza.backends.mlx.zoo import MlxReferenceModel

        return MlxReferenceModel(checkpoint.folder, checkpoint.outline.vocab_size)

    def _check_installed(self) -> None:
        missing = [name for name in ("mlx", "mlx_lm") if self._find(name) is None]
        if missing:
            raise ConfigError(
                f"--backend mlx needs {' and '.join(missing)}, which this installation lacks; "
                f"{_INSTALL}, or choose another --backend"
            )
