"""The readers of headers under a guided fuzz: an honest answer or a named error, always."""

import json
import math
import random
import struct
import sys
from collections.abc import Callable
from typing import Any

import pytest

from cadenza import json_object
from cadenza.checkpoint.gguf import reader
from cadenza.checkpoint.gguf.reader import read_header
from cadenza.errors import CheckpointError
from cadenza.weights import safetensors_file
from cadenza.weights.safetensors_file import LENGTH_BYTES, read_entries
from cadenza.weights.weight_format import FORMAT_OF_CODE, FORMAT_OF_NAME
from tests.checkpoint.files import encode_file, encode_tensors, small_model
from tests.checkpoint.fuzzing import NUMBERS, Fuzz, Grammar, Target
from tests.checkpoint.gguf_bytes import BF16_TENSOR, File, Tensor, small_file

RUNS_BY_DAY = 800
SOAK_SECONDS = 600.0
MAX_MESSAGE = 600

WORDS = (
    b'{ } [ ] , : " "dtype" "shape" "data_offsets" "__metadata__" "F32" "BF16" "F16" "I64" null '
    b'true NaN Infinity -1 1e400 0.5 [] {} [0,0] ,0 ,1 "a" \xff {"a":{"dtype":"F32","shape":[],'
).split()


def mend(data: bytes) -> bytes:
    """The length at the front says where the header's last brace is."""
    end = data.rfind(b"}", LENGTH_BYTES) + 1
    return max(end - LENGTH_BYTES, 0).to_bytes(LENGTH_BYTES, "little") + data[LENGTH_BYTES:]


def alter(draw: random.Random, data: bytes) -> bytes:
    """Another dtype, shape, place or number of tensors; half of the time in a file that fits it."""
    end = data.rfind(b"}", LENGTH_BYTES) + 1
    try:
        table = json.loads(data[LENGTH_BYTES:end])
        name = draw.choice(list(table))
        entry = table[name]
        shape, offsets = entry["shape"], entry["data_offsets"]
        change = draw.randrange(5)
        if change == 0:
            entry["dtype"] = draw.choice(("F32", "F16", "BF16", "I64", "", None))
        elif change == 1:
            shape.insert(draw.randrange(len(shape) + 1), draw.choice((0, 1, 2, 1 << 62, -1, 0.5)))
        elif change == 2:
            shape[draw.randrange(len(shape))] = draw.choice((0, 1, 3, [], None))
        elif change == 3:
            offsets[draw.randrange(len(offsets))] += draw.choice((-8, -1, 1, 4, 8))
        else:
            table[name + "'"] = json.loads(json.dumps(entry))
        size = lay_out(table) if draw.random() < 0.5 else len(data) - end
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return data
    return encode_file(table, bytes(max(0, min(int(size), 4096))))


def lay_out(table: dict[str, Any]) -> int:
    position = 0
    for entry in table.values():
        size = math.prod(entry["shape"]) * FORMAT_OF_CODE[entry["dtype"]].numpy.itemsize
        entry["data_offsets"] = [position, position + size]
        position += size
    return position


def seeds() -> list[bytes]:
    tensors = small_model()[1]
    few = dict(list(tensors.items())[:2])
    empty = {"a": {"dtype": "BF16", "shape": [0, 3], "data_offsets": [0, 0]}}
    scalar = {
        "a": {"dtype": "F16", "shape": [], "data_offsets": [0, 2]},
        "__metadata__": {"b": "c"},
    }
    return [
        encode_file(*encode_tensors(few)),
        encode_file(empty, b""),
        encode_file(scalar, b"ab"),
        encode_file({}, b""),
    ]


def check(data: bytes) -> None:
    """Reads `data`; what is accepted must be true, and a refusal must be fit to be read."""
    try:
        header, entries = read_entries(data, "model.safetensors")
    except CheckpointError as refusal:
        check_message(str(refusal))
        raise
    position = LENGTH_BYTES + len(header)
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.stop)):
        assert entry.start == position
        size = math.prod(entry.shape) * FORMAT_OF_NAME[entry.dtype].numpy.itemsize
        assert entry.stop - entry.start == size
        position = entry.stop
    assert position == len(data)


def check_message(message: str) -> None:
    assert 0 < len(message) < MAX_MESSAGE


CODES = (0, 1, 2, 4, 6, 7, 8, 9, 12, 13, 30, 39)
GGUF_WORDS = (
    *(struct.pack("<I", code) for code in CODES),
    *(struct.pack("<Q", number) for number in (0, 1, 2, 32, 1 << 40, (1 << 64) - 1)),
    struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 64),
    b"GGUF",
    b"\xff",
)


def alter_gguf(draw: random.Random, data: bytes) -> bytes:
    """Another number of 4 or 8 bytes somewhere, most of the time near the one that was there."""
    width = draw.choice((4, 8))
    if len(data) < width:
        return data
    place = draw.randrange(len(data) - width + 1)
    number = int.from_bytes(data[place : place + width], "little")
    if draw.random() < 0.3:
        number = draw.choice((*NUMBERS, *CODES))
    else:
        number += draw.choice((-32, -1, 1, 8, 32))
    changed = (number % (1 << 8 * width)).to_bytes(width, "little")
    return data[:place] + changed + data[place + width :]


def seeds_gguf() -> list[bytes]:
    halves = File(tensors=[Tensor("a", [4, 1, 2], code=BF16_TENSOR)], data=bytes(16))
    return [small_file().encode(), halves.encode(), File().encode()]


def check_gguf(data: bytes) -> None:
    """Reads `data`; what is accepted must be true, and a refusal must be fit to be read."""
    try:
        header = read_header(data, "x.gguf")
    except CheckpointError as refusal:
        check_message(str(refusal))
        raise
    position = header.num_bytes
    for tensor in sorted(header.tensors.values(), key=lambda tensor: tensor.start):
        num_blocks, rest = divmod(math.prod(tensor.shape), tensor.type.block_len)
        assert rest == 0
        assert tensor.stop - tensor.start == num_blocks * tensor.type.block_bytes > 0
        assert position <= tensor.start
        position = tensor.stop
    assert position <= len(data)


def fuzz(name: str, target: Target, seed: int) -> Fuzz:
    if name == "gguf":
        grammar = Grammar(words=GGUF_WORDS, alter=alter_gguf, mend=lambda data: data)
        read, of = reader, seeds_gguf()
    else:
        grammar = Grammar(words=WORDS, alter=alter, mend=mend)
        read, of = safetensors_file, seeds()
    watched = {str(read.__file__), json_object.__file__, __file__}
    return Fuzz(target, of, grammar, watched, CheckpointError, seed)


CHECKS = {"safetensors": check, "gguf": check_gguf}


@pytest.mark.parametrize("name", CHECKS)
def test_a_reader_withstands_some_fuzzing(name: str):
    session = fuzz(name, CHECKS[name], seed=1)
    finding = session.run(max_runs=RUNS_BY_DAY)
    assert finding is None, finding
    assert session.num_runs == RUNS_BY_DAY


def test_the_same_seed_takes_the_same_way():
    first, second = (fuzz("safetensors", check, seed=2) for _ in range(2))
    first.run(max_runs=400)
    second.run(max_runs=400)
    assert first.edges == second.edges


def accept_overlaps(data: bytes) -> None:
    """A reader that takes the header's word for where tensors lie."""
    num_header_bytes = int.from_bytes(data[:LENGTH_BYTES], "little")
    try:
        table = json.loads(data[LENGTH_BYTES : LENGTH_BYTES + num_header_bytes])
        places = [entry["data_offsets"] for entry in table.values() if "dtype" in entry]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError("refused") from error
    assert len({str(place) for place in places}) == len(places) or not places[0][-1:]


def stumble_deep(data: bytes) -> None:
    """The reader, with a fault behind conditions of which each is a new step between lines."""
    _, entries = read_entries(data, "x")
    for entry in entries.values():
        if entry.dtype != "float32":
            continue
        if 0 not in entry.shape:
            continue
        if len(entry.shape) < 3:
            continue
        raise ZeroDivisionError


def trust_the_counts(data: bytes) -> None:
    """A reader that unpacks what the counts claim."""
    if data[:4] != b"GGUF" or len(data) < 24:
        raise CheckpointError("refused")
    position = 24
    for _ in range(min(struct.unpack_from("<Q", data, 16)[0], 9)):
        (length,) = struct.unpack_from("<Q", data, position)
        position += 8 + length


def stumble_over_f16(data: bytes) -> None:
    """The reader, with a fault behind conditions of which each is a new step between lines."""
    for tensor in read_header(data, "x").tensors.values():
        if tensor.type.name != "F16":
            continue
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("name", "planted"),
    [
        ("safetensors", accept_overlaps),
        ("safetensors", stumble_deep),
        ("gguf", trust_the_counts),
        pytest.param("gguf", stumble_over_f16, marks=pytest.mark.soak),
    ],
)
def test_a_planted_fault_is_found(name: str, planted: Callable[[bytes], None]):
    finding = fuzz(name, planted, seed=3).run(max_runs=60_000)
    assert finding is not None
    data = bytes.fromhex(finding.rpartition(" ")[2])
    with pytest.raises((AssertionError, ZeroDivisionError, IndexError, TypeError, struct.error)):
        planted(data)


@pytest.mark.soak
@pytest.mark.parametrize("name", CHECKS)
def test_a_reader_withstands_ten_minutes_of_fuzzing(name: str):
    session = fuzz(name, CHECKS[name], seed=4)
    finding = session.run(max_seconds=SOAK_SECONDS)
    sys.stderr.write(f"{session.num_runs} runs, {len(session.edges)} steps between lines\n")
    assert finding is None, finding
