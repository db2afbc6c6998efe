"""`cadenza verify`: shows on this machine that batching changes no bit of any stream.

Owns the command's flags and what it prints; what is compared is `engine.verification`'s.
"""

import dataclasses
import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import typer

from cadenza.cli.options import JsonFlag
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError

if TYPE_CHECKING:
    from cadenza.loading.plan import EnginePlan
    from cadenza.verification.gate import GateResult
    from cadenza.verification.run import VerifyOptions
    from cadenza.verification.self_test import SelfTestResult

CHECK_FAILED = 1

Reference = Literal["independent", "solo", "both"]

OPTION_SETS = ("none", "all")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GateFlags:
    """What is played and compared."""

    num_requests: Annotated[
        int | None, typer.Option(help="Requests to play (default: twice the rows).")
    ] = None
    max_tokens: Annotated[int, typer.Option(help="The longest answer.")] = 48
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0
    reference: Annotated[
        str,
        typer.Option(
            metavar="independent|solo|both",
            help="Compare with the plain reference engine, with each request alone, or with both.",
        ),
    ] = "both"
    options: Annotated[
        str,
        typer.Option(
            metavar="none|all",
            help="all: play the matrix of sampling options, in which every two values of two "
            "options meet, in about 150 requests.",
        ),
    ] = "none"
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="Verify random weights of this shape (a config.json, or a name such as "
            "tiny-llama) instead of a model: no trained margin hides an error.",
        ),
    ] = None
    url: Annotated[
        str | None,
        typer.Option(
            metavar="http://…",
            help="Ask a running server instead: each request alone, then all at once.",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="CADENZA_API_KEY",
            show_envvar=False,
            help="With --url: the key that the server wants.",
        ),
    ] = None
    self_test: Annotated[
        bool,
        typer.Option(
            "--self-test",
            help="Inject known errors into the operations; the gate must catch each. The native "
            "kernels are tested where they were built with faults (`make -C csrc faults`).",
        ),
    ] = False


def verify(
    context: typer.Context,
    gate: GateFlags,
    config: EngineConfig,
    model: Annotated[
        str | None, typer.Argument(help="The model's folder (default: the bundled one).")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Show that every stream is exactly what its request gives alone.

    Plays requests of staggered lengths, half of them sampled, alone and then together: in several
    chunk sizes, with the prefix cache cold and hot, plain and overlapped, and over a pool so small
    that requests are preempted. The longest passes 1,024 tokens and the model's attention window,
    or is as long as the context allows; `longest=` in the last line says how long it was. With
    --options all each request has another combination of sampling options. Exit code 0 when every
    bit is equal, 1 when not.
    """
    _refuse_idle_flags(context, gate)
    if gate.url is not None:
        if not _verify_url(gate, gate.url, model, json_output=json_output):
            raise typer.Exit(CHECK_FAILED)
        return
    options = _options(gate, config, model)
    passed = (_self_test if gate.self_test else _verify)(options, json_output=json_output)
    if not passed:
        raise typer.Exit(CHECK_FAILED)


def _refuse_idle_flags(context: typer.Context, gate: GateFlags) -> None:
    """Refuses what was written on the command line and would change nothing.

    A variable of the environment is for all commands, and may say more than one of them reads.
    """
    engines = {field.name for field in dataclasses.fields(EngineConfig)} - {"seed"}
    idle = {"api_key"} if gate.url is None else {*engines, "reference"}
    for name in sorted(idle):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            where = "without --url" if gate.url is None else "with --url, which asks a server"
            raise ConfigError(f"{flag} changes nothing {where}; leave it out")
    if gate.num_requests is not None and gate.num_requests < 1:
        raise ConfigError(f"--num-requests {gate.num_requests} must be 1 or more")


def _verify(options: "VerifyOptions", *, json_output: bool) -> bool:
    from cadenza.verification.run import verify

    with _progress() as report:
        result, plan = verify(options, report)
    _print_result(result, plan, json_output=json_output)
    return result.passed


def _verify_url(gate: GateFlags, url: str, model: str | None, *, json_output: bool) -> bool:
    from cadenza.verification.over_http import NUM_REQUESTS, UrlOptions, verify_url

    is_local = gate.shape is not None or gate.self_test or gate.options != "none"
    if model is not None or is_local:
        raise ConfigError(
            "--url asks a running server; give no model, --shape, --self-test or --options"
        )
    options = UrlOptions(
        url=url,
        api_key=gate.api_key,
        num_requests=gate.num_requests or NUM_REQUESTS,
        max_tokens=gate.max_tokens,
        seed=gate.seed,
    )
    with _progress() as report:
        result = verify_url(options, report)
    if json_output:
        print(json.dumps(_facts(result)))
        return result.passed
    for mode in result.modes:
        print(f"{mode.name}: {mode.num_equal}/{mode.num_streams} equal")
    _print_closing_lines(result)
    return result.passed


def _self_test(options: "VerifyOptions", *, json_output: bool) -> bool:
    from cadenza.verification.run import self_test

    with _progress() as report:
        result = self_test(options, report)
    _print_self_test(result, json_output=json_output)
    return result.passed


def _options(gate: GateFlags, config: EngineConfig, model: str | None) -> "VerifyOptions":
    from cadenza.verification.option_matrix import make_matrix
    from cadenza.verification.run import VerifyOptions

    if gate.options not in OPTION_SETS:
        raise ConfigError(f"--options {gate.options!r} is not none or all")
    is_matrix = gate.options == "all"
    if is_matrix and gate.num_requests is not None:
        raise ConfigError(
            f"--num-requests {gate.num_requests} with --options all: the matrix says how many "
            f"requests there are; leave --num-requests out"
        )
    if gate.shape is not None and model is not None:
        raise ConfigError(f"both a model ({model}) and --shape {gate.shape} were given; give one")
    if gate.reference not in get_args(Reference):
        raise ConfigError(f"--reference {gate.reference!r} is not independent, solo or both")
    return VerifyOptions(
        model=model,
        shape=gate.shape,
        num_requests=gate.num_requests or 2 * config.max_num_seqs,
        max_tokens=gate.max_tokens,
        seed=gate.seed,
        reference=cast(Reference, gate.reference),
        matrix=make_matrix() if is_matrix else None,
        config=config,
    )


@contextmanager
def _progress() -> Generator[Callable[[str], None]]:
    """A line on the terminal that says what is being played; nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield status.update


def _print_result(result: "GateResult", plan: "EnginePlan", *, json_output: bool) -> None:
    if json_output:
        print(json.dumps(_as_json(result, plan)))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("mode", "equal", "joined", "reused", "preempted", "hits", "tok/s", box=None)
    for mode in result.modes:
        counts = mode.counts
        numbers = (counts.admitted_midstream, counts.rows_reused, counts.preempted)
        table.add_row(
            mode.name,
            f"{mode.num_equal}/{mode.num_streams}",
            *(str(number) for number in (*numbers, counts.cache_hits)),
            f"{mode.tokens_per_s:.0f}",
        )
    Console().print(table)
    print("joined: in mid-stream; reused: rows; hits: prompts with a cached prefix")
    print(f"backend: {plan.traits.name}, {plan.traits.ops} ops, {plan.dtype}")
    _print_closing_lines(result)


def _print_closing_lines(result: "GateResult") -> None:
    print(_throughput_line(result))
    if result.shortfall is not None:
        print(f"note: {result.shortfall}")
    print(result.last_line)


def _throughput_line(result: "GateResult") -> str:
    batched, sequential = result.batched_tokens_per_s, result.sequential_tokens_per_s
    ratio = batched / sequential if sequential else 0.0
    return f"throughput: {batched:.0f} tok/s batched (vs {sequential:.0f} sequential, {ratio:.1f}x)"


def _as_json(result: "GateResult", plan: "EnginePlan") -> dict[str, object]:
    return {
        **_facts(result),
        "backend": plan.traits.name,
        "ops": plan.traits.ops,
        "dtype": plan.dtype,
    }


def _facts(result: "GateResult") -> dict[str, object]:
    return {
        "passed": result.passed,
        "num_requests": result.num_requests,
        "longest": result.longest,
        "longest_wanted": result.wanted,
        "modes": [dataclasses.asdict(mode) for mode in result.modes],
        "counts": dataclasses.asdict(result.counts),
        "mismatch": None if result.mismatch is None else dataclasses.asdict(result.mismatch),
        "missing": result.missing,
        "options": None if result.coverage is None else dataclasses.asdict(result.coverage),
        "batched_tokens_per_s": result.batched_tokens_per_s,
        "sequential_tokens_per_s": result.sequential_tokens_per_s,
        "last_line": result.last_line,
    }


def _print_self_test(tested: "SelfTestResult", *, json_output: bool) -> None:
    if json_output:
        print(json.dumps({**dataclasses.asdict(tested), "passed": tested.passed}))
        return
    print(f"no fault: {'the gate passes' if tested.sound_passed else 'THE GATE FAILS'}")
    for fault in tested.caught:
        print(f"caught: {fault}")
    for fault in tested.missed:
        print(f"MISSED: {fault}")
    for fault in tested.skipped:
        print(f"skipped, the context is too short for it to show: {fault}")
    if tested.note is not None:
        print(f"note: {tested.note}")
    print(tested.last_line)
