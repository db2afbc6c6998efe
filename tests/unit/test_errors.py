"""How values and sizes are told in error messages."""

import pytest

from cadenza.errors import show_missing, show_size

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (MIB - 1, "1048575 bytes"),
        (MIB, "1.0 MiB"),
        (256 * MIB, "256.0 MiB"),
        (988_097_824, "942.3 MiB"),
        (8 << 30, "8,192.0 MiB"),
    ],
)
def test_sizes_are_told_in_mib(num_bytes: int, text: str):
    assert show_size(num_bytes) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(17, "17 bytes"), (MIB, "1.0 MiB"), (MIB + 1, "1.1 MiB"), ((8 << 30) + 1, "8,192.1 MiB")],
)
def test_what_is_missing_is_rounded_up(num_bytes: int, text: str):
    assert show_missing(num_bytes) == text
