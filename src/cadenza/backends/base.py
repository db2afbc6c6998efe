"""The contract of the device side: `Backend`, and the `Runner` that it loads.

A `Backend` describes itself on a device before anything is loaded, and loads everything that
computes there. One without a witness, instruments or faults returns None for them. A `Runner` turns
`ModelInputs` into `StepOutput`, one launched step after the other. It knows pages, rows and slots;
it knows no request, no scheduler and no text. Every runner passes one contract suite
(`tests/contract`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from cadenza.checkpoint.dtypes import WeightDType
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.weights import Weights
from cadenza.config import EngineLimits, Ops
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
    def capabilities(self) -> frozenset[Capability]:
        """What it can report beyond tokens; requests that ask for more are refused."""
        ...

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSetup:
    """How a model is put on a device.

    Args:
        device, ops: as `Backend.describe` takes them.
        dtype: of weights, activations and KV; one of the traits' `dtypes`.
        fill: the value of KV slots that nobody has written (`verify` uses NaN).
        cache_folder: where compiled programs may be kept; None keeps none.
    """

    limits: EngineLimits
    device: str
    ops: Ops
    dtype: WeightDType
    fill: float = 0.0
    cache_folder: Path | None = None


LoadRunner = Callable[[ModelConfig, Weights, RunnerSetup], Runner]


class SequenceModel(Protocol):
    """The witness: the same model written a second time, one sequence, float32.

    It shares no arithmetic with the backend's runner, so that the two agree only if both are right.
    """

    @property
    def vocab_size(self) -> int: ...

    def start(self) -> None:
        """Forgets the sequence; the next token is at position 0."""
        ...

    def append(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        """The logits [V] after these tokens, which follow those that were appended before."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTotals:
    """One operation's calls, their time, and the bytes that it had to read at least once."""

    name: str
    num_calls: int
    elapsed_s: float
    read_bytes: int


class Instruments(Protocol):
    """What measures a backend's own device code: the machine's limits, the time of operations."""

    @property
    def cpu_isa(self) -> str:
        """The instruction set whose kernels run."""
        ...

    @property
    def num_threads(self) -> int: ...

    def new_buffer(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory for `read_bytes_per_s`."""
        ...

    def read_bytes_per_s(self, buffer: npt.NDArray[np.uint8], *, repeats: int) -> float:
        """All threads read a buffer of `new_buffer`; the fastest of the passes."""
        ...

    def operations_per_s(self, dtype: WeightDType, *, repeats: int) -> float:
        """All threads multiply `dtype` in registers, the fastest of the runs; a multiplication and
        its sum are two operations."""
        ...

    def start_profile(self) -> None:
        """Begins to count, from zero."""
        ...

    def stop_profile(self) -> tuple[OpTotals, ...]:
        """Stops counting; every operation there is, also those without a call."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A runner with one known fault, which `verify` must catch.

    `min_tokens` is the shortest longest prompt in which the fault shows.
    """

    name: str
    load_runner: LoadRunner
    min_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultSet:
    """The faults of an op table. `load_sound` is the control: the same table without any.

    `note` says why `ops` is not the op table that serves; None where it is.
    """

    ops: Ops
    load_sound: LoadRunner
    faults: tuple[Fault, ...]
    note: str | None = None


class Backend(Protocol):
    """One way of computing. Stateless: constructing one loads and allocates nothing."""

    def describe(self, device: str, ops: Ops, model: ModelConfig) -> BackendTraits:
        """What it would be like; finds the device, loads no weights.

        Raises:
            ConfigError: it has no such device or operations.
            DeviceUnavailableError: this machine lacks the device.
        """
        ...

    def load_runner(self, model: ModelConfig, weights: Weights, setup: RunnerSetup) -> Runner:
        """A runner with its weights in place, not warmed up. Raises as `describe`."""
        ...

    def load_witness(
        self, model: ModelConfig, weights: Weights, max_model_len: int
    ) -> SequenceModel | None:
        """The independent model for contexts of `max_model_len`; None where there is none."""
        ...

    def watch_compiles(self) -> Callable[[], int]:
        """Counts programs compiled in this process from now on; once a process, for its only
        engine. A backend that compiles nothing counts none."""
        ...

    def open_instruments(self) -> Instruments | None:
        """None where it has none. Raises ConfigError when they cannot be loaded."""
        ...

    def find_faults(self, ops: str) -> FaultSet | None:
        """The faults of the op table that traits call `ops`; None where there are none."""
        ...
