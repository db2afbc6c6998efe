"""The GGUF reader under a coverage-guided fuzz: an honest answer or a named error, always."""

import math
import random
import struct
import sys
from collections.abc import Callable

import pytest

from cadenza.checkpoint import json_object
from cadenza.checkpoint.gguf import reader
from cadenza.checkpoint.gguf.reader import read_header
from cadenza.errors import CheckpointError
from tests.checkpoint.fuzzing import NUMBERS, Fuzz, Grammar, Target
from tests.checkpoint.gguf_bytes import BF16_TENSOR, File, Tensor, small_file

SOAK_SECONDS = 600.0
MAX_MESSAGE = 600

CODES = (0, 1, 2, 4, 6, 7, 8, 9, 12, 13, 30, 39)
WORDS = (
    *(struct.pack("<I", code) for code in CODES),
    *(struct.pack("<Q", number) for number in (0, 1, 2, 32, 1 << 40, (1 << 64) - 1)),
    struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 64),
    b"GGUF",
    b"\xff",
)


def alter(draw: random.Random, data: bytes) -> bytes:
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


def seeds() -> list[bytes]:
    halves = File(tensors=[Tensor("a", [4, 1, 2], code=BF16_TENSOR)], data=bytes(16))
    return [small_file().encode(), halves.encode(), File().encode()]


def check(data: bytes) -> None:
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


def check_message(message: str) -> None:
    assert 0 < len(message) < MAX_MESSAGE


def fuzz(target: Target, seed: int) -> Fuzz:
    watched = {reader.__file__, json_object.__file__, __file__}
    grammar = Grammar(words=WORDS, alter=alter, mend=lambda data: data)
    return Fuzz(target, seeds(), grammar, watched, CheckpointError, seed)


def test_the_gguf_reader_withstands_some_fuzzing():
    session = fuzz(check, seed=1)
    finding = session.run(max_runs=4000)
    assert finding is None, finding
    assert session.num_runs == 4000


def trust_the_counts(data: bytes) -> None:
    """A reader that unpacks what the counts claim."""
    if data[:4] != b"GGUF" or len(data) < 24:
        raise CheckpointError("refused")
    position = 24
    for _ in range(min(struct.unpack_from("<Q", data, 16)[0], 9)):
        (length,) = struct.unpack_from("<Q", data, position)
        position += 8 + length


def stumble_deep(data: bytes) -> None:
    """The reader, with a fault behind conditions of which each is a new step between lines."""
    for tensor in read_header(data, "x").tensors.values():
        if tensor.type.name != "F16":
            continue
        raise ZeroDivisionError


@pytest.mark.parametrize("planted", [trust_the_counts, stumble_deep])
def test_a_planted_fault_is_found(planted: Callable[[bytes], None]):
    finding = fuzz(planted, seed=3).run(max_runs=60_000)
    assert finding is not None
    data = bytes.fromhex(finding.rpartition(" ")[2])
    with pytest.raises((struct.error, ZeroDivisionError)):
        planted(data)


@pytest.mark.soak
def test_the_gguf_reader_withstands_ten_minutes_of_fuzzing():
    session = fuzz(check, seed=4)
    finding = session.run(max_seconds=SOAK_SECONDS)
    sys.stderr.write(f"{session.num_runs} runs, {len(session.edges)} steps between lines\n")
    assert finding is None, finding
