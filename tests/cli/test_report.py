"""A result described once: its JSON object, its table, and the forms of its values."""

import io
import json
from dataclasses import dataclass

import pytest
from rich.console import Console

from cadenza.cli.report import (
    NOTHING,
    Column,
    as_object,
    as_table,
    json_line,
    keys,
    print_table,
    section_text,
    value_text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    name: str
    output_tok_s: float | None
    part: Part


COLUMNS = (
    Column("name", "who", footer="all"),
    Column("output_tok_s", "tok/s"),
    Column("tokens", "of them", "part.num_tokens"),
    Column(None, "twice", lambda result: 2 * result.part.num_tokens, "{} tokens".format),
    *keys("part"),
)
FAST = Result(name="fast", output_tok_s=1234.56, part=Part(num_tokens=3))
BROKEN = Result(name="broken", output_tok_s=None, part=Part(num_tokens=0))


def test_the_object_has_the_columns_with_a_key_and_unrounded_values():
    assert json.loads(json_line(as_object(COLUMNS, FAST))) == {
        "name": "fast",
        "output_tok_s": 1234.56,
        "tokens": 3,
        "part": {"num_tokens": 3},
    }
    assert as_object(COLUMNS, BROKEN)["output_tok_s"] is None


def test_the_table_has_the_columns_with_a_heading_in_the_form_of_their_units():
    page = io.StringIO()
    Console(file=page, width=80).print(as_table(COLUMNS, [FAST, BROKEN]))
    rows = [line.split() for line in page.getvalue().splitlines() if line.strip(" ─")]
    assert rows == [
        ["who", "tok/s", "of", "them", "twice"],
        ["fast", "1235", "3", "6", "tokens"],
        ["broken", NOTHING, "0", "0", "tokens"],
        ["all"],
    ]


def test_a_table_wider_than_the_terminal_is_printed_in_full(capsys: pytest.CaptureFixture[str]):
    wide = tuple(Column(None, f"a heading of column {index}", "name") for index in range(9))
    print_table(as_table(wide, [FAST]))
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(f"a heading of column {index}" in shown for index in range(9))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("weight_bytes", 3 << 20, "3.0 MiB"),
        ("kv_bytes_per_token", 512, "512 bytes"),
        ("load_gb_s", 9.04, "9.04 GB/s"),
        ("total_s", 1.234, "1.23 s"),
        ("load_s", (1.0, 2.0), "1.00 s, 2.00 s"),
        ("step_ms", 4.81234, "4.812"),
        ("share_of_bound", 0.567, "57%"),
        ("server_us_per_token", 77.7, "78"),
        ("num_parameters", 3410688, "3,410,688"),
        ("is_supported", True, "yes"),
        ("tokenizer", None, NOTHING),
        ("not_applied", (), NOTHING),
        ("generation_defaults", {"temperature": 0.25}, "temperature: 0.25"),
        ("name", "a\x1b[2Jb", "a\N{REPLACEMENT CHARACTER}[2Jb"),
    ],
)
def test_a_keys_ending_is_the_unit_of_its_value(key: str, value: object, text: str):
    assert value_text(key, value) == text


def test_a_section_has_a_line_for_each_fact():
    assert section_text("memory", {"num_pages": 4, "kv_bytes": 2048}) == (
        "memory\n  num_pages  4\n  kv_bytes   2.0 KiB"
    )


def test_a_section_without_facts_is_its_title():
    assert section_text("tensors", {}) == "tensors"


def test_a_number_that_is_not_finite_is_no_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_line({"loss": float("nan")})
