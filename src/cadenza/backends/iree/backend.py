"""`IreeBackend`: `backends.base.Backend` on IREE's runtime, over modules that were compiled ahead.
Imports IREE only when it loads a runner, so that a missing installation is explained."""

from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec

from cadenza.backends import find_backend
from cadenza.backends.base import Backend, BackendTraits, Runner, RunnerSetup, SequenceModel
from cadenza.backends.iree.manifest import Cpu, Manifest, read_manifest
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import Ops
from cadenza.errors import CheckpointError, ConfigError
from cadenza.weights.weight_format import WEIGHT_DTYPES

PACKAGE = "iree-base-runtime"
REQUIREMENT = f"{PACKAGE}==3.13.0"  # of the bundled model's modules
PROCESS_BYTES = 96 << 20  # libraries and modules of a process, beside weights and KV
LOGIT_COPIES = 12  # as the plain operations have: the thresholds of top-k and top-p, and the rules
ATTENTION_SPAN = 128  # attention passes over so many positions at a time


class IreeBackend(Backend):
    """CPUs, by modules for IREE's local-sync and local-task. `find` looks an installed package
    up."""

    def __init__(
        self, find: Callable[[str], object | None] = find_spec, cpu: Cpu | None = None
    ) -> None:
        self._find = find
        self._cpu = cpu or Cpu.of_this_machine()

    def describe(self, device: str, ops: Ops, checkpoint: Checkpoint) -> BackendTraits:
        manifest = self._manifest(device, ops, checkpoint)
        return BackendTraits(
            name=f"iree:{manifest.target}",
            ops="compiled",
            exactness="bitwise",
            dtypes=(manifest.dtype,),
            dtype_for=dict.fromkeys(WEIGHT_DTYPES, manifest.dtype),
            max_num_batched_tokens=manifest.most.num_tokens,
            device_memory_bytes=None,
            kv_layouts=("dense",),
            default_max_model_len=manifest.max_model_len,
            compiled_for=manifest.most,
            slot_unit=1,
            attention_span=ATTENTION_SPAN,
            capabilities=frozenset(),
            process_bytes=PROCESS_BYTES,
            logit_copies=LOGIT_COPIES,
            gathered_layers=2,
        )

    def describe_arithmetic(self, device: str, ops: Ops, checkpoint: Checkpoint) -> tuple[str, ...]:
        manifest = self._manifest(device, ops, checkpoint)
        return (version(PACKAGE), *manifest.described)

    def load_runner(self, checkpoint: Checkpoint, setup: RunnerSetup) -> Runner:
        manifest = self._manifest(setup.device, setup.ops, checkpoint)
        from cadenza.backends.iree.runner import IreeRunner

        return IreeRunner(checkpoint, manifest, setup)

    def load_reference(self, checkpoint: Checkpoint, max_model_len: int) -> SequenceModel | None:
        # That of xla, which needs JAX: it shares no code with compiled modules.
        return find_backend("xla").load_reference(checkpoint, max_model_len)

    def _manifest(self, device: str, ops: Ops, checkpoint: Checkpoint) -> Manifest:
        self._check_installed()
        if ops == "split":
            raise ConfigError("--tensor-parallel-size: compiled modules run on one device")
        if ops != "auto":
            raise ConfigError(f"--ops {ops}: the iree backend has the compiled modules; use auto")
        if checkpoint.format == "gguf":
            raise CheckpointError(
                "the iree backend reads folders that `cadenza export` wrote, not GGUF files; "
                "choose another --backend"
            )
        manifest = read_manifest(checkpoint.folder)
        self._check_version(manifest)
        self._check_device(device, manifest)
        return manifest

    def _check_device(self, device: str, manifest: Manifest) -> None:
        is_cpu = manifest.target == "llvm-cpu"
        if not is_cpu:
            raise ConfigError(
                f"modules for {manifest.target} are compiled and not served, since none was shown "
                f"to be exact (docs/iree.md); export the model with --target llvm-cpu"
            )
        if device not in ("auto", "cpu"):
            raise ConfigError(
                f"--device {device}: the compiled modules are for {manifest.target}; use auto"
            )
        missing = [each for each in manifest.features if each not in self._cpu.flags]
        if is_cpu and manifest.architecture != self._cpu.architecture:
            missing = [manifest.architecture]
        if is_cpu and missing:
            raise CheckpointError(
                f"the modules were compiled for a CPU with {', '.join(missing)}, which this "
                f"machine lacks; export the model again with --cpu generic, on this machine"
            )

    def _check_version(self, manifest: Manifest) -> None:
        installed = version(PACKAGE)
        if installed != manifest.compiler:
            raise CheckpointError(
                f"the modules were compiled by IREE {manifest.compiler}, and the runtime is "
                f"{installed}: install {PACKAGE}=={manifest.compiler}, or export the model again"
            )

    def _check_installed(self) -> None:
        try:
            missing = self._find("iree.runtime") is None
        except ModuleNotFoundError:  # of the package `iree`
            missing = True
        if missing:
            raise ConfigError(
                f"--backend iree needs {PACKAGE}, which this installation lacks; "
                f"pip install {REQUIREMENT}, or choose another --backend"
            )
