"""A second backend, as somebody would add one: a class, and a line in a table of backends.

It computes with the token-storing runner and has no reference model, instruments or faults. Nothing
here imports an array library but numpy.
"""

from collections.abc import Callable

from cadenza.backends.base import (
    BackendTraits,
    FaultSet,
    Instruments,
    Runner,
    RunnerSetup,
    SequenceModel,
)
from cadenza.backends.fake import FakeRunner, next_token
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import Ops
from cadenza.errors import DeviceUnavailableError
from cadenza.models.model_config import ModelConfig

STUBS = {"stub": "tests.faces.stub_backend:StubBackend"}

GREEDY = (0, 0)


class StubBackend:
    def reserve_memory(self, share: float) -> None:
        """Does nothing: there is none."""

    def describe(self, device: str, ops: Ops, checkpoint: Checkpoint) -> BackendTraits:
        if device not in ("auto", "cpu"):
            raise DeviceUnavailableError(f"--device {device}: the stub has cpu only")
        return BackendTraits(
            name="stub:cpu",
            ops="stored tokens",
            exactness="bitwise",
            dtypes=("float32",),
            dtype_for={"float32": "float32", "bfloat16": "float32", "float16": "float32"},
            max_num_batched_tokens=64,
            device_memory_bytes=1 << 30,
        )

    def describe_arithmetic(self, device: str, ops: Ops, checkpoint: Checkpoint) -> tuple[str, ...]:
        return ("stored tokens",)

    def name_arithmetic(self, checkpoint: Checkpoint, setup: RunnerSetup) -> str | None:
        return None

    def find_setting(self, arithmetic: str) -> str | None:
        return None

    def load_runner(self, checkpoint: Checkpoint, setup: RunnerSetup) -> Runner:
        limits = setup.limits
        return FakeRunner(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_pages_per_seq=limits.max_pages_per_seq,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            vocab_size=checkpoint.outline.vocab_size,
        )

    def load_reference(self, checkpoint: Checkpoint, max_model_len: int) -> SequenceModel | None:
        return None

    def watch_compiles(self) -> Callable[[], int]:
        return lambda: 0

    def open_instruments(self, ops: str = "native") -> Instruments | None:
        return None

    def find_faults(self, ops: str, model: ModelConfig) -> FaultSet | None:
        return None


def greedy_tokens(prompt: tuple[int, ...], count: int, vocab_size: int) -> tuple[int, ...]:
    """What the stub answers."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_token(history, GREEDY, vocab_size=vocab_size))
    return tuple(history[len(prompt) :])
