"""`cadenza bench … --quick`: few and short runs, which every flag and a file can change."""

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from cadenza.cli.app import build_app
from cadenza.cli.bench import NAMES
from cadenza.cli.options import variables_of

APP: Any = get_command(build_app())
BENCH: Any = APP.commands["bench"]


def parsed(command: str, *arguments: object) -> dict[str, Any]:
    words = [str(each) for each in arguments]
    return BENCH.commands[command].make_context(command, words).params


def test_quick_plays_few_and_short_runs():
    quick, whole = parsed("throughput", "--quick"), parsed("throughput")
    assert (quick["concurrency"], quick["output_len"], quick["repeats"]) == ((1, 8), 32, 1)
    assert (whole["concurrency"], whole["output_len"], whole["repeats"]) == (None, None, None)
    batching = parsed("batching", "--quick")  # more requests than rows, so that some wait
    assert (batching["max_num_seqs"], batching["num_requests"], batching["repeats"]) == (4, 12, 1)
    assert parsed("startup", "--quick")["repeats"] == 1
    assert parsed("load", "--quick")["repeats"] == 2


def test_quick_loads_a_server_with_few_requests():
    quick = parsed("serve", "http://127.0.0.1:1", "--quick")
    assert (quick["concurrency"], quick["num_requests"]) == ((1, 8), 12)
    assert quick["output_lens"] == (16, 32)


@pytest.mark.parametrize("order", [1, -1])
def test_flags_and_the_file_come_before_quick(tmp_path: Path, order: int):
    file = tmp_path / "bench.toml"
    file.write_text("repeats = 3\nmax_num_seqs = 9\n")
    words = [["--quick"], ["--config", file], ["--concurrency", "4"]][::order]
    found = parsed("throughput", *(word for part in words for word in part))
    assert (found["concurrency"], found["repeats"], found["output_len"]) == ((4,), 3, 32)
    assert found["max_num_seqs"] == 9


def test_the_flag_says_what_it_stands_for():
    for command, form in (("throughput", "--concurrency 1,8 --output-len 32"), ("load", "--rep")):
        option = next(each for each in BENCH.commands[command].params if each.name == "quick")
        assert form in option.help


def test_all_commands_are_there_and_none_has_a_variable_that_no_other_command_has():
    """So that a start need not make them to know the variables."""
    assert tuple(BENCH.commands) == NAMES
    own = frozenset[str]().union(*map(variables_of, BENCH.commands.values()))
    assert own
    assert own <= variables_of(APP)
