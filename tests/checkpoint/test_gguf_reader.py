"""The GGUF reader: what it reads is what was written, and a file that lies is refused by name."""

import struct
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from cadenza.checkpoint.gguf.reader import (
    MAX_ENTRIES,
    MAX_STRINGS,
    MAX_TENSORS,
    TENSOR_TYPES,
    open_gguf,
    read_header,
)
from cadenza.errors import CheckpointError
from tests.checkpoint.gguf_bytes import (
    ARRAY,
    BOOL,
    I32,
    Q4_0_TENSOR,
    STRING,
    U8,
    U16,
    U32,
    U64,
    File,
    Items,
    Raw,
    Tensor,
    small_file,
)

HUGE = (1 << 64) - 1
MAX_PEAK_BYTES = 200_000


def test_a_files_metadata_and_tensors_are_those_that_were_written():
    data = small_file().encode()
    header = read_header(data, "x.gguf")
    values = dict(header.metadata.values)
    assert isinstance(values["a.numbers"], np.ndarray)
    assert list(values.pop("a.numbers")) == [1, -2]
    assert values == {
        "general.architecture": "llama",
        "a.flag": True,
        "a.number": 7,
        "a.epsilon": 1e-5,
        "a.long": 1 << 40,
        "a.texts": ["x", "é"],
    }
    first, second = header.tensors["first"], header.tensors["second"]
    assert (first.shape, first.type.name) == ((2, 3), "F32")
    assert np.array_equal(np.frombuffer(data[first.start : first.stop], "<f4"), range(6))
    assert (second.shape, second.type.name) == ((1, 32), "Q4_0")
    assert data[second.start : second.stop] == bytes(range(18))


def test_version_2_is_read_like_version_3():
    data = small_file(version=struct.pack("<I", 2)).encode()
    assert set(read_header(data, "x.gguf").tensors) == {"first", "second"}


def test_a_float32_is_the_decimal_that_config_json_would_have():
    header = read_header(small_file().encode(), "x.gguf")
    assert header.metadata.get("a.epsilon") == 1e-5
    assert header.metadata.get("a.epsilon") != float(np.float32(1e-5))


def test_arrays_of_numbers_are_views_of_the_file():
    header = read_header(small_file().encode(), "x.gguf")
    numbers = header.metadata.get("a.numbers")
    assert isinstance(numbers, np.ndarray)
    assert not numbers.flags.owndata
    assert not numbers.flags.writeable


@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 4096])
def test_the_data_starts_at_a_multiple_of_the_alignment(alignment: int):
    padding = -24 % alignment
    file = small_file(
        metadata=[("general.alignment", alignment)],
        tensors=[Tensor("a", [6]), Tensor("b", [1], offset=24 + padding)],
        data=struct.pack("<6f", *range(6)) + bytes(padding) + struct.pack("<f", 9.0),
        alignment=alignment,
    )
    data = file.encode()
    tensors = read_header(data, "x.gguf").tensors
    assert tensors["a"].start % alignment == 0
    assert struct.unpack("<f", data[tensors["b"].start : tensors["b"].stop]) == (9.0,)


def test_a_file_of_gguf_py_is_read_as_gguf_py_reads_it(tmp_path: Path):
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_token_list(["a", "▁b", "<0x00>"])
    writer.add_token_scores([0.5, -1.0, 2.0])
    rows = np.linspace(-3, 3, 5 * 64, dtype=np.float32).reshape(5, 64)
    for name, kind in (("a", "F32"), ("b", "Q8_0"), ("c", "Q4_1"), ("d", "BF16"), ("e", "MXFP4")):
        code = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(rows, code), raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert len(ours.header.tensors) == len(theirs.tensors) == 5
    for each in theirs.tensors:
        found = ours.header.tensors[each.name]
        assert found.start == each.data_offset
        assert found.stop - found.start == each.n_bytes
        assert found.type.name == each.tensor_type.name
        assert list(found.shape) == list(reversed(each.shape.tolist()))
    for key in ("llama.block_count", "tokenizer.ggml.tokens", "tokenizer.ggml.scores"):
        assert np.array_equal(ours.header.metadata.get(key), theirs.fields[key].contents())


def test_block_sizes_are_those_of_gguf_py():
    theirs = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType
    }
    ours = {
        code: (each.name, each.block_len, each.block_bytes) for code, each in TENSOR_TYPES.items()
    }
    known = ours.keys() & theirs.keys()  # an older gguf-py lacks some
    assert len(known) > 20
    assert {code: ours[code] for code in known} == {code: theirs[code] for code in known}


def metadata(*entries: tuple[str | bytes, Any]) -> File:
    return File(metadata=list(entries))


def first_tensor(**changes: Any) -> File:
    file = small_file()
    return replace(file, tensors=[replace(file.tensors[0], **changes), file.tensors[1]])


def second_tensor(**changes: Any) -> File:
    file = small_file()
    return replace(file, tensors=[file.tensors[0], replace(file.tensors[1], **changes)])


LENGTH = len(small_file().encode())

HOSTILE: dict[str, tuple[File | bytes, str]] = {
    "nothing": (b"", "the format's name at byte 0 takes 4 bytes, but the file has 0"),
    "another format": (b"\x80\x00\x00\x00\x00\x00\x00\x00{}", "a GGUF file starts with b'GGUF'"),
    "version 1": (File(version=struct.pack("<I", 1)), "version 1 .* supported are 2 and 3"),
    "version 4": (File(version=struct.pack("<I", 4)), "version 4"),
    "big-endian": (File(version=struct.pack(">I", 3)), "big-endian"),
    "tensors without end": (File(num_tensors=HUGE), rf"claims {HUGE} tensors; at most 100000"),
    "more tensors than fit": (small_file(num_tensors=MAX_TENSORS), "the file has bytes for"),
    "metadata without end": (File(num_entries=HUGE), "metadata entries; at most 65536"),
    "more metadata than fits": (small_file(num_entries=MAX_ENTRIES), "the file has bytes for"),
    "a tensor more than there are": (small_file(num_tensors=3), "takes|claims|at byte|has"),
    "an entry more than there are": (small_file(num_entries=8), "a tensor's name has"),
    "a key without end": (
        replace(File(num_entries=1, data=struct.pack("<Q", HUGE) + bytes(64)), alignment=1),
        f"a metadata key has {HUGE} bytes; at most 65535",
    ),
    "a key behind the end": (
        replace(File(num_entries=1, data=struct.pack("<Q", 9) + b"abcdefgh"), alignment=1),
        "a metadata key at byte 32 takes 9 bytes, but the file has 8",
    ),
    "a key that is not text": (metadata((b"\xff\xfe", 1)), "a metadata key is not UTF-8"),
    "a key twice": (metadata(("a", 1), ("b", 2), ("a", 1)), "key 'a' occurs twice"),
    "a string without end": (
        metadata(("a", Raw(STRING, struct.pack("<Q", HUGE)))),
        rf"'a' at byte \d+ takes {HUGE} bytes",
    ),
    "a string that is not text": (
        metadata(("a", Raw(STRING, b"\1" + bytes(7) + b"\xff"))),
        "'a' is not UTF-8",
    ),
    "a value of no type": (metadata(("a", Raw(13, bytes(64)))), "'a' has the value type 13"),
    "a flag of 2": (metadata(("a", Raw(BOOL, b"\2"))), "the flag 'a' is 2, not 0 or 1"),
    "an array without end": (
        metadata(("a", Items(U8, [1, 2, 3], count=HUGE))),
        f"'a' claims {HUGE} items of at least 1 bytes",
    ),
    "an array whose size wraps around": (
        metadata(("a", Items(U64, [1, 2], count=(1 << 61) + 2))),
        "items of at least 8 bytes",
    ),
    "strings without end": (metadata(("a", Items(STRING, ["x"], count=1 << 40))), "claims"),
    "a string of an array behind the end": (
        metadata(("a", Raw(ARRAY, struct.pack("<IQQ", STRING, 3, 64) + bytes(66)))),
        "string 1 of 'a' ends after the file's 128 bytes",
    ),
    "a string of an array without end": (
        metadata(("a", Raw(ARRAY, struct.pack("<IQQ", STRING, 1, HUGE) + bytes(32)))),
        "string 0 of 'a' ends after",
    ),
    "a string of an array that is not text": (
        metadata(("a", Items(STRING, [b"ok", b"\xc3"]))),
        "string 1 of 'a' is not UTF-8",
    ),
    "items of no type": (
        metadata(("a", Raw(ARRAY, struct.pack("<IQ", 99, 0)))),
        "'a' has items of the value type 99",
    ),
    "arrays in an array": (
        metadata(("a", Items(ARRAY, [Items(U8, [1]), Items(U8, [2])]))),
        "'a' is an array of arrays",
    ),
    "arrays nested without end": (
        metadata(("a", Raw(ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000))),
        "'a' is an array of arrays",
    ),
    "an alignment of 0": (metadata(("general.alignment", 0)), "general.alignment is 0"),
    "an alignment of 48": (metadata(("general.alignment", 48)), "power of two from 1 to 65536"),
    "an alignment of 2^31": (metadata(("general.alignment", 1 << 31)), "general.alignment is 2147"),
    "an alignment in text": (metadata(("general.alignment", "32")), "general.alignment is '32'"),
    "a name without end": (first_tensor(name="x" * 513), "name has 513 bytes; at most 512"),
    "a name that is not text": (first_tensor(name=b"\xff"), "a tensor's name is not UTF-8"),
    "a name twice": (first_tensor(name="second"), "tensor 'second' is listed twice"),
    "no axes": (first_tensor(sizes=[]), "has 0 axes; allowed are 1 to 4"),
    "five axes": (first_tensor(sizes=[1, 1, 1, 2, 3]), "has 5 axes"),
    "axes without end": (first_tensor(rank=(1 << 32) - 1), "axes; allowed are 1 to 4"),
    "an empty axis": (first_tensor(sizes=[0, 2]), r"has the shape \[2, 0\] in F32"),
    "a size without end": (first_tensor(sizes=[HUGE, 1]), r"sizes must be positive and fit"),
    "sizes whose product wraps around": (
        first_tensor(sizes=[1 << 32, 1 << 32]),
        "sizes must be positive and fit",
    ),
    "sizes whose bytes wrap around": (first_tensor(sizes=[1 << 62, 2]), "fit the file's"),
    "rows of part of a block": (
        second_tensor(sizes=[16, 2]),
        "has rows of 16 elements; Q4_0 needs a multiple of 32",
    ),
    "a type that is not known": (first_tensor(code=4), "has the type 4, which is not known"),
    "a type without end": (first_tensor(code=(1 << 32) - 1), "which is not known"),
    "a tensor behind the end": (second_tensor(sizes=[32, 2]), "ends at byte .* it was cut"),
    "an offset without end": (second_tensor(offset=HUGE - 31), "it must be at 32"),
    "an offset that is not aligned": (second_tensor(offset=24), "it must be at 32"),
    "tensors over each other": (second_tensor(offset=0), "it must be at"),
    "a hole between tensors": (second_tensor(offset=64), "it must be at 32, after"),
    "a first tensor that is not first": (first_tensor(offset=64), "it must be at 0"),
    "cut in the data": (small_file().encode()[:-1], "it was cut"),
    "cut in the tensor list": (small_file().encode()[: LENGTH - 80], "the file has|has bytes for"),
}


def encoded(file: File | bytes) -> bytes:
    return file if isinstance(file, bytes) else file.encode()


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_that_lies_is_refused_by_name_before_anything_is_allocated(case: str):
    file, words = HOSTILE[case]
    data = encoded(file)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=words) as refusal:
            read_header(data, "x.gguf")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(refusal.value)
    assert "x.gguf" in message
    assert len(message) < 400
    assert peak < MAX_PEAK_BYTES


def test_the_number_of_strings_is_bounded_over_all_arrays():
    """Eight bytes of a file must not become the sixty of an object without end."""
    empty = Raw(ARRAY, struct.pack("<IQ", STRING, MAX_STRINGS) + bytes(8 * MAX_STRINGS))
    with pytest.raises(CheckpointError, match=f"at most {MAX_STRINGS} are allowed"):
        read_header(metadata(("a", Items(STRING, ["x"])), ("b", empty)).encode(), "x.gguf")


def test_a_file_cut_anywhere_is_refused():
    content = small_file().encode()
    for num_bytes in range(0, len(content), 3):
        with pytest.raises(CheckpointError):
            read_header(content[:num_bytes], "x.gguf")


def test_the_honest_file_of_the_corpus_is_read():
    assert len(read_header(small_file().encode(), "x.gguf").tensors) == 2
    assert read_header(metadata(("a", Items(U16, [1])), ("b", Items(I32, []))).encode(), "x.gguf")
    assert read_header(metadata(("a", Raw(U32, bytes(4)))).encode(), "x.gguf").tensors == {}
    assert second_tensor(code=Q4_0_TENSOR).encode() == small_file().encode()


def test_a_file_that_is_not_regular_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_gguf(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(CheckpointError, match=r"empty\.gguf is empty"):
        open_gguf(tmp_path / "empty.gguf")
