"""How much of a device's memory an engine takes: devices that only tell their size."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import jax
import pytest

from cadenza.backends.base import BackendTraits
from cadenza.backends.xla import device
from cadenza.backends.xla.backend import XlaBackend
from cadenza.backends.xla.device import DeviceMemory, memory_of_device, reserve_memory
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig, Ops
from cadenza.errors import ConfigError
from cadenza.loading.build import plan_model
from cadenza.loading.plan import device_share
from tests.faces.stub_backend import StubBackend

GIB = 1 << 30


@dataclass(slots=True, eq=False)
class ToldDevice:
    platform: str = "gpu"
    stats: Mapping[str, int] | None = field(default_factory=lambda: {"bytes_limit": 60 * GIB})

    def memory_stats(self) -> Mapping[str, int] | None:
        return self.stats


@pytest.mark.parametrize(
    ("environment", "total"),
    [
        ({}, 80),
        ({"XLA_CLIENT_MEM_FRACTION": "0.5"}, 120),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.6"}, 100),
    ],
)
def test_a_gpu_has_more_than_its_allocator(environment: dict[str, str], total: int) -> None:
    found = memory_of_device(ToldDevice(), environment)
    assert found == DeviceMemory(allocator_bytes=60 * GIB, total_bytes=total * GIB)


def test_a_tpu_gives_all_and_a_cpu_tells_nothing() -> None:
    whole = DeviceMemory(allocator_bytes=60 * GIB, total_bytes=60 * GIB)
    assert memory_of_device(ToldDevice("tpu"), {}) == whole
    assert memory_of_device(ToldDevice("cpu"), {}) is None
    assert memory_of_device(ToldDevice(stats=None), {}) is None
    assert memory_of_device(ToldDevice(stats={"bytes_in_use": 1}), {}) is None


def test_the_share_is_asked_for_unless_the_environment_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device.xla_bridge, "backends_are_initialized", lambda: False)
    environment: dict[str, str] = {}
    reserve_memory(0.92, environment)
    assert environment == {"XLA_CLIENT_MEM_FRACTION": "0.92"}
    told = ToldDevice(stats={"bytes_limit": 92 * GIB})
    assert memory_of_device(told, environment) == DeviceMemory(
        allocator_bytes=92 * GIB, total_bytes=100 * GIB
    )
    theirs = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}
    reserve_memory(0.92, theirs)
    assert theirs == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.3"}


def test_a_share_that_comes_after_the_allocator_is_of_the_true_total() -> None:
    jax.devices()
    environment: dict[str, str] = {}
    reserve_memory(0.3, environment)
    assert environment == {}
    told = memory_of_device(ToldDevice(stats={"bytes_limit": 75 * GIB}), environment)
    assert told is not None
    assert told == DeviceMemory(allocator_bytes=75 * GIB, total_bytes=100 * GIB)
    gpu = traits(told.allocator_bytes, told.total_bytes)
    assert device_share(EngineConfig(gpu_memory_utilization=0.3), gpu) == 30 * GIB


def traits(allocator: int | None, total: int | None) -> BackendTraits:
    stub = StubBackend().describe("cpu", "auto", open_checkpoint(None))
    return replace(stub, device_memory_bytes=allocator, device_total_bytes=total)


def test_a_plan_has_the_share_of_the_whole_device() -> None:
    gpu = traits(92 * GIB, 100 * GIB)
    assert device_share(EngineConfig(), gpu) == 92 * GIB
    assert device_share(EngineConfig(gpu_memory_utilization=0.5), gpu) == 50 * GIB
    assert device_share(EngineConfig(gpu_memory_utilization=0.92), gpu) == 92 * GIB
    assert device_share(EngineConfig(), traits(None, None)) is None


def test_a_share_that_the_allocator_does_not_have_is_refused_with_the_one_it_has() -> None:
    said = "--gpu-memory-utilization 0.9 is .*; set --gpu-memory-utilization 0.75$"
    gpu = traits(75 * GIB, 100 * GIB)
    with pytest.raises(ConfigError, match=said):
        device_share(EngineConfig(gpu_memory_utilization=0.9), gpu)
    assert device_share(EngineConfig(gpu_memory_utilization=0.75), gpu) == 75 * GIB


class ShareBackend(StubBackend):
    def __init__(self) -> None:
        self._share = 0.75

    def reserve_memory(self, share: float) -> None:
        self._share = share

    def describe(self, device: str, ops: Ops, checkpoint: Checkpoint) -> BackendTraits:
        own = super().describe(device, ops, checkpoint)
        return replace(own, device_memory_bytes=int(self._share * GIB), device_total_bytes=GIB)


BACKENDS = {"stub": "tests.xla.test_device_memory:ShareBackend"}


def test_the_share_is_asked_for_before_the_device_is_described_and_planned_with() -> None:
    model = open_checkpoint(None)
    assert plan_model(model, EngineConfig(backend="stub"), BACKENDS).available_bytes == 0.75 * GIB
    config = EngineConfig(backend="stub", gpu_memory_utilization=0.9)
    plan = plan_model(model, config, BACKENDS)
    assert plan.available_bytes == int(0.9 * GIB)
    assert plan.planned_bytes <= plan.available_bytes
    assert plan.footprint.process_bytes == plan.footprint.front_end_bytes == 0


def test_on_the_cpu_a_share_is_refused_with_what_to_set() -> None:
    config = EngineConfig(device="cpu", gpu_memory_utilization=0.9)
    said = "is a share of a GPU's memory, and xla:cpu uses host .*; set --kv-cache-memory-bytes"
    with pytest.raises(ConfigError, match=said):
        device_share(config, XlaBackend().describe("cpu", "auto", open_checkpoint(None)))


@pytest.mark.parametrize("value", [0.0, 1.1, -1.0, float("nan"), True, "0.9"])
def test_what_is_no_share_is_refused_by_its_flag(value: float) -> None:
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization .* a share from 0\.01 to 1"):
        EngineConfig(gpu_memory_utilization=value)
