"""The safetensors reader on honest files, and on lies beside those of `hostile`."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cadenza.errors import CheckpointError
from cadenza.weights.safetensors_file import MAX_HEADER_BYTES, open_safetensors
from tests.checkpoint.files import encode_file, encode_tensors, write_tensors

PAIR = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.float16),
}
HEADER, DATA = encode_tensors(PAIR)


def changed(name: str, **changes: Any) -> dict[str, Any]:
    return {**HEADER, name: {**HEADER[name], **changes}}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_tensors_come_back_as_they_were_written(tmp_path: Path, dtype: Any):
    tensors = {
        "matrix": np.linspace(-3, 3, 15).astype(dtype).reshape(3, 5),
        "scalar": np.array(2.5, dtype=dtype),
        "empty": np.zeros((0, 4), dtype=dtype),
    }
    write_tensors(tmp_path / "x.safetensors", tensors)
    _, stored = open_safetensors(tmp_path / "x.safetensors")
    assert set(stored) == set(tensors)
    for name, array in tensors.items():
        view = stored[name].array()
        assert view.dtype == array.dtype
        assert view.shape == array.shape
        assert view.tobytes() == array.tobytes() == bytes(stored[name].raw_bytes)


def test_views_share_the_files_pages_and_cannot_be_written(tmp_path: Path):
    write_tensors(tmp_path / "x.safetensors", PAIR)
    _, stored = open_safetensors(tmp_path / "x.safetensors")
    first, second = stored["a"].array(), stored["a"].array()
    assert np.shares_memory(first, second)
    assert not first.flags.owndata
    assert not first.flags.writeable


def test_views_outlive_the_file_object(tmp_path: Path):
    write_tensors(tmp_path / "x.safetensors", PAIR)
    view = open_safetensors(tmp_path / "x.safetensors")[1]["a"].array()
    assert view.tolist() == PAIR["a"].tolist()


def test_metadata_and_padded_headers_are_accepted(tmp_path: Path):
    header = json.dumps({"__metadata__": {"format": "pt"}, **HEADER}).encode() + b"   "
    (tmp_path / "x.safetensors").write_bytes(encode_file(header, DATA))
    assert set(open_safetensors(tmp_path / "x.safetensors")[1]) == {"a", "b"}


LIES: dict[str, tuple[bytes, str]] = {
    "seven bytes": (b"1234567", "too few"),
    "a header cut short": (encode_file(HEADER, DATA, claimed_length=20), "JSON"),
    "a hole": (encode_file(changed("b", data_offsets=[26, 34]), DATA + b"xx"), "hole"),
    "offsets that are texts": (encode_file(changed("a", data_offsets=["0", "24"]), DATA), "'0'"),
    "no offsets": (encode_file({"a": {"dtype": "F32", "shape": [6]}}, DATA), "data_offsets"),
    "no shape": (encode_file({"a": {"dtype": "F32", "data_offsets": [0, 32]}}, DATA), "shape"),
    "a shape of another size": (encode_file(changed("a", shape=[2, 4]), DATA), "32 bytes"),
    "a fractional shape": (encode_file(changed("a", shape=[2.0, 3]), DATA), "2.0"),
    "a shape with a truth value": (encode_file(changed("a", shape=[True, 6]), DATA), "True"),
    "a million lists": (encode_file({"a": [[]] * 1_000_000}, b""), "over 100000 tensors"),
}


@pytest.mark.parametrize(("content", "said"), LIES.values(), ids=LIES)
def test_a_lying_file_is_a_named_error(tmp_path: Path, content: bytes, said: str):
    path = tmp_path / "lying.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as raised:
        open_safetensors(path)
    assert "lying.safetensors" in str(raised.value)
    assert len(str(raised.value)) < 600


def test_a_header_over_the_cap_is_refused_before_it_is_read(tmp_path: Path):
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(CheckpointError, match="claims"):
        open_safetensors(path)


def test_what_is_no_regular_file_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="regular"):
        open_safetensors(tmp_path)
    with pytest.raises(CheckpointError, match="No such file"):
        open_safetensors(tmp_path / "absent.safetensors")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4))
def test_any_damaged_bytes_are_read_or_refused(tmp_path: Path, edits: list[tuple[int, int]]):
    content = bytearray(encode_file(HEADER, DATA))
    for place, byte in edits:
        content[place % len(content)] = byte
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    try:
        _, stored = open_safetensors(path)
    except CheckpointError:
        return
    for entry in stored.values():
        assert entry.array().nbytes == entry.num_bytes
        assert 0 <= entry.start <= entry.stop <= len(content)
