"""`load_parameters`: the parameters of compiled modules, without a second copy of any weight:
tensors that lie one after the other in a mapped file, aligned, are used there, others are put
together in memory, once. `cadenza export` writes files in which all tensors are in that order."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import iree.runtime as rt
import numpy as np
import numpy.typing as npt

from cadenza.backends.iree.manifest import FOLDER, MADE_FILE, SCOPE, Manifest, Parameter
from cadenza.checkpoint.dtypes import FORMAT_OF_NAME
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.rope_factors import rope_factors
from cadenza.checkpoint.safetensors_file import open_safetensors
from cadenza.checkpoint.stored_tensor import StoredTensor
from cadenza.errors import CheckpointError

ALIGNMENT = 64
"""Of what IREE uses in place."""

AnyArray = npt.NDArray[Any]


class Parameters:
    """The parameters of a model's modules; their arrays live as long as this."""

    def __init__(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        self._checkpoint = checkpoint
        self._manifest = manifest
        made_file = checkpoint.folder / FOLDER / MADE_FILE
        self._made = open_safetensors(made_file)[1] if made_file.exists() else {}
        self.num_copied_bytes = 0
        """Of those that are not part of a file."""
        self._arrays = {each.name: self._load(each) for each in manifest.parameters}

    def provider(self) -> rt.ParameterProvider:
        index = rt.ParameterIndex()
        for name, array in self._arrays.items():
            index.add_buffer(name, array)
        return index.create_provider(scope=SCOPE)

    def _load(self, parameter: Parameter) -> AnyArray:
        """A flat array of the parameter's bytes. Raises CheckpointError."""
        shape, dtype = parameter.array.shape, _dtype_of(parameter)
        if parameter.rope is not None:
            rope = self._checkpoint.config.ropes[parameter.rope]
            made = np.asarray(rope_factors(rope, self._manifest.max_model_len), dtype)
            return self._copied(parameter, [made])
        stored = [self._entry(name) for name in parameter.tensors or (parameter.name,)]
        if sum(each.num_bytes for each in stored) == 0 or not shape:
            raise CheckpointError(f"the parameter {parameter.name} of {FOLDER}/ has no elements")
        if _is_in_place(stored, dtype):
            first, last = stored[0], stored[-1]
            found = np.frombuffer(first.data, np.uint8, last.stop - first.start, first.start)
            self._check(parameter, found.nbytes)
            return found
        return self._copied(parameter, [np.asarray(each.array(), dtype) for each in stored])

    def _entry(self, name: str) -> StoredTensor:
        weights = self._checkpoint.weights
        if name in self._made:
            return self._made[name]
        if name not in weights or not isinstance(weights.tensors[name], StoredTensor):
            raise CheckpointError(
                f"the compiled modules need the tensor {name}, which the checkpoint does not have "
                f"as floats; export the model again"
            )
        return weights.entry(name)

    def _copied(self, parameter: Parameter, parts: Sequence[AnyArray]) -> AnyArray:
        num_bytes = sum(each.nbytes for each in parts)
        self._check(parameter, num_bytes)
        room = np.empty(num_bytes + ALIGNMENT, np.uint8)
        start = -room.ctypes.data % ALIGNMENT
        whole = room[start : start + num_bytes]
        offset = 0
        for each in parts:
            whole[offset : offset + each.nbytes] = each.reshape(-1).view(np.uint8)
            offset += each.nbytes
        self.num_copied_bytes += num_bytes
        return whole

    def _check(self, parameter: Parameter, num_bytes: int) -> None:
        wanted = int(np.prod(parameter.array.shape)) * _dtype_of(parameter).itemsize
        if num_bytes != wanted:
            raise CheckpointError(
                f"the parameter {parameter.name} has {num_bytes} bytes in the checkpoint, and the "
                f"compiled modules take {wanted}; export the model again"
            )


def _dtype_of(parameter: Parameter) -> np.dtype[Any]:
    found = next((f for f in FORMAT_OF_NAME.values() if f.name == parameter.array.dtype), None)
    if found is None:
        raise CheckpointError(f"parameter {parameter.name} has the type {parameter.array.dtype}")
    return found.numpy


def _is_in_place(stored: Sequence[StoredTensor], dtype: np.dtype[Any]) -> bool:
    """Whether tensors are one aligned part of a file, in the type that is wanted."""
    first = stored[0]
    return (
        all(FORMAT_OF_NAME[each.dtype].numpy == dtype and each.encoding is None for each in stored)
        and all(each.num_paired_heads is None and each.data is first.data for each in stored)
        and all(before.stop == after.start for before, after in pairwise(stored))
        and first.start % ALIGNMENT == 0
    )
