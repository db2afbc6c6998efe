"""The device seam: what a runner must offer the engine.

A runner turns `ModelInputs` into `StepOutput`, one launched step after the other. It knows pages,
rows and slots; it knows no request, no scheduler and no text. Every backend passes one contract
suite (`tests/contract`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from cadenza.checkpoint.dtypes import WeightDType
from cadenza.core.step_schema import ModelInputs, StepOutput

Exactness = Literal["bitwise", "token"]
Capability = Literal["logprobs", "attachments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendTraits:
    """What a backend would be like on a device, told before anything is loaded.

    Args:
        name: backend and device, for people: `xla:cpu`.
        ops: the implementation of the model's operations, for people.
        exactness: what is the same for a request alone and in any batch: every bit of its results,
            or its tokens only. `verify` compares accordingly.
        dtypes: the types it computes in.
        dtype_for: the one it takes by itself, by the checkpoint's own.
        max_num_batched_tokens: the default token budget.
        device_memory_bytes: None where the device shares the host's memory.
    """

    name: str
    ops: str
    exactness: Exactness
    dtypes: tuple[WeightDType, ...]
    dtype_for: Mapping[WeightDType, WeightDType]
    max_num_batched_tokens: int
    device_memory_bytes: int | None


class StepHandle(Protocol):
    """A launched step."""

    def result(self) -> StepOutput:
        """Waits for the device. Raises RunnerError (or what the device raised) when it failed."""
        ...


class Runner(Protocol):
    """One model on one device, with its pages."""

    @property
    def name(self) -> str:
        """Backend, device and operations, for people: `xla:cpu (native ops)`."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """The padded step sizes it has programs for, rising; the last is the token budget's cap."""
        ...

    def warmup(self) -> None:
        """Compiles every program there will ever be."""
        ...

    def launch(self, inputs: ModelInputs) -> StepHandle:
        """Starts a step and returns at once; steps run in the order of their launches."""
        ...

    def reset(self) -> None:
        """After a failed step: waits for what was launched, forgets all KV, can launch again."""
        ...

    def close(self) -> None:
        """Waits for what was launched and gives back the device's memory; nothing may be launched
        afterwards. Idempotent."""
        ...
