"""Which tensors of a checkpoint each parameter of an exported program is made of: one tensor, or
several joined, perhaps in another type. They are found by their contents, so that no family has to
list them; what is found is equal in every bit."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cadenza.backends.iree.manifest import Array, Parameter
from cadenza.checkpoint.model_config import ModelConfig
from cadenza.checkpoint.rope_factors import rope_factors
from cadenza.checkpoint.weights import Weights

AnyArray = npt.NDArray[Any]

_PROBE_BYTES = 64  # the bytes at a tensor's start by which it is looked up


def find_parameters(
    model: ModelConfig,
    weights: Weights,
    names: Iterable[str],
    exported: Mapping[str, AnyArray],
    max_model_len: int,
) -> tuple[Parameter, ...]:
    """The tensors of these names that each exported array is made of."""
    tensors = {name: weights.array(name) for name in names}
    search = _Search(model, tensors, max_model_len)
    return tuple(search.find(name, array) for name, array in exported.items())


class _Search:
    def __init__(
        self, model: ModelConfig, tensors: Mapping[str, AnyArray], max_model_len: int
    ) -> None:
        self._tensors = tensors
        self._ropes = [np.asarray(rope_factors(rope, max_model_len)) for rope in model.ropes]
        self._by_type: dict[str, dict[bytes, list[str]]] = {}

    def find(self, name: str, array: AnyArray) -> Parameter:
        shape = Array(shape=array.shape, dtype=array.dtype.name)
        for index, rope in enumerate(self._ropes):
            if rope.dtype == array.dtype and np.array_equal(rope, array):
                return Parameter(name=name, array=shape, rope=index)
        return Parameter(name=name, array=shape, tensors=self._parts(array))

    def _parts(self, array: AnyArray) -> tuple[str, ...]:
        """The tensors that an array is a concatenation of; empty if there are none."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        found: list[str] = []
        place = 0
        while place < len(content):
            name = self._at(content[place:], array.dtype)
            if name is None:
                return ()
            found.append(name)
            place += self._tensors[name].size * array.dtype.itemsize
        return tuple(found)

    def _at(self, content: AnyArray, dtype: np.dtype[Any]) -> str | None:
        for name in self._starting(dtype).get(content[:_PROBE_BYTES].tobytes(), ()):
            wanted = self._tensors[name].astype(dtype).reshape(-1).view(np.uint8)
            if np.array_equal(content[: len(wanted)], wanted):
                return name
        return None

    def _starting(self, dtype: np.dtype[Any]) -> dict[bytes, list[str]]:
        """The tensors by their first bytes, converted to that type."""
        if dtype.name not in self._by_type:
            found: dict[bytes, list[str]] = defaultdict(list)
            for name, tensor in self._tensors.items():
                first = tensor.reshape(-1)[: _PROBE_BYTES // dtype.itemsize].astype(dtype)
                found[first.tobytes()].append(name)
            self._by_type[dtype.name] = found
        return self._by_type[dtype.name]
