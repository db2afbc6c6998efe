"""`cadenza verify` and `replay`: show on this machine that no bit of any stream changes.

Own the commands' flags and what they print; the comparisons are `verification`'s.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cadenza.cli.options import EngineFlags, JsonFlag, ModelArgument, ModelFlag
from cadenza.cli.report import Column, Columns, as_object, as_table, json_line, keys, show_result
from cadenza.cli.status import status_line
from cadenza.config import DEFAULT_MAX_NUM_SEQS, EngineConfig
from cadenza.errors import ConfigError
from cadenza.option import flag
from cadenza.server_link import CACERT_HELP, ServerLink

if TYPE_CHECKING:
    from cadenza.verification.option_matrix import Option, OptionMatrix
    from cadenza.verification.replay import NamedReceipt, Replayed
    from cadenza.verification.run import VerifyOptions
    from cadenza.verification.self_test import SelfTestResult
    from cadenza.verification.verifier import Verdict, VerifierResult

CHECK_FAILED = 1
EXIT_CODES: "Mapping[Verdict, int]" = {"PASS": 0, "MISMATCH": CHECK_FAILED, "NOT SHOWN": 4}

_MODE: Columns = (
    Column(None, "mode", read="name"),
    Column(None, "equal", read=lambda mode: f"{mode.num_equal}/{mode.num_streams}"),
    Column(None, "joined", read="counts.admitted_midstream"),
    Column(None, "reused", read="counts.rows_reused"),
    Column(None, "preempted", read="counts.preempted"),
    Column(None, "hits", read="counts.cache_hits"),
    Column(None, "tok/s", "tokens_per_s", "{:.0f}".format),
)
_RESULT: Columns = (
    *keys("verdict", "passed", "num_requests", "longest"),
    Column("longest_wanted", read="wanted"),
    *keys("modes", "counts", "mismatch", "missing"),
    Column("options", read="coverage"),
    *keys("left_out"),
    *keys("batched_tokens_per_s", "sequential_tokens_per_s", "digest", "last_line"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFlags:
    """What is played and compared."""

    num_requests: int | None = flag(None, "Requests to play (default: twice the rows).")
    max_tokens: int = flag(48, "The longest answer.")
    seed: int = flag(0, "Seed of the workload.")
    reference: Literal["independent", "solo", "both"] = flag(
        "both", "Compare with the plain reference engine, with each request alone, or with both."
    )
    options: Literal["none", "all"] = flag(
        "none",
        "all: play the matrix of sampling options, in which every two values of two options meet, "
        "in about 150 requests.",
    )
    shape: str | None = flag(
        None,
        "Verify random weights of this shape (a config.json, or a name such as tiny-llama) instead "
        "of a model: a trained model's margins hide errors.",
        metavar="FILE|NAME",
    )
    url: str | None = flag(
        None,
        "Ask a running server instead: each request alone, then together with others.",
        metavar="http://…",
    )
    api_key: str | None = flag(
        None, "With --url: the server's API key.", metavar="KEY", has_variable=True
    )
    cacert: str | None = flag(None, f"With --url. {CACERT_HELP}", metavar="FILE")
    portable: bool = flag(
        False,
        "Compute with --arithmetic portable, and print a digest of the streams: it is the same on "
        "every machine.",
    )
    self_test: bool = flag(
        False,
        "Inject known errors into the operations; `verify` must catch each. The native kernels are "
        "tested where they were built with faults (`make -C csrc faults`).",
    )


def verify_command(
    context: typer.Context,
    flags: VerifyFlags,
    config: EngineFlags,
    model: ModelArgument = None,
    json: JsonFlag = False,
) -> int:
    """Show that every stream is exactly what its request gives alone.

    Plays requests of staggered lengths, half of them sampled, alone and then together: in several
    chunk sizes, with the prefix cache cold and hot, plain and overlapped, and over a pool so small
    that requests are preempted. The longest passes 1,024 tokens (128 with MLX on a CPU) and the
    model's attention window, or is as long as the context allows; `longest=` in the last line is
    its length. With --options all each request has another combination of sampling options. With
    --images most requests have images: every chunk size up to an image's tokens, hits that end
    inside an image, requests cancelled and engines lost while one is encoded. Exit codes: 0 PASS,
    1 MISMATCH, 4 NOT SHOWN: every bit was equal, but something that a way of running is meant to
    show, a preemption say, did not occur.
    """
    _refuse_idle_flags(context, flags)
    if flags.url is not None:
        return EXIT_CODES[_verify_url(flags, flags.url, model, as_json=json)]
    verify = _self_test if flags.self_test else _verify
    if flags.portable:
        config = replace(config, arithmetic="portable")
    has_images = config.images and _is_written(context, "images")
    options = replace(_options(flags, config, model), images=has_images)
    return EXIT_CODES[verify(options, as_json=json)]


def _refuse_idle_flags(context: typer.Context, flags: VerifyFlags) -> None:
    """Those of the command line alone: an environment variable applies to all commands."""
    engine = {field.name for field in fields(EngineConfig)} - {"seed"}
    stored = {"prefix_cache_disk", "prefix_cache_disk_bytes"}
    idle = {"api_key", "cacert", *stored} if flags.url is None else {*engine, "reference"}
    for name in sorted(idle):
        if _is_written(context, name):
            where = "without --url" if flags.url is None else "with --url, which asks a server"
            raise ConfigError(f"--{name.replace('_', '-')} changes nothing {where}; leave it out")
    if flags.num_requests is not None and flags.num_requests < 1:
        raise ConfigError(f"--num-requests {flags.num_requests} must be 1 or more")


def _is_written(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _verify(options: "VerifyOptions", *, as_json: bool) -> "Verdict":
    from cadenza.verification.run import verify

    with status_line("starting") as report:
        result, plan = verify(options, report)
    traits = plan.traits
    backend = {"backend": traits.name, "ops": traits.ops, "dtype": plan.dtype}
    lines = [
        "joined: in mid-stream; reused: rows; hits: prompts with a cached prefix",
        f"backend: {traits.name}, {traits.ops} ops, {plan.dtype}",
    ]
    if options.config.arithmetic == "portable":
        lines.append(f"portable digest: {result.digest}")
    table = (as_table(_MODE, each) for each in [result.modes])
    text = chain(table, lines, _closing_lines(result))
    show_result(as_object(_RESULT, result) | backend, text, as_json=as_json)
    return result.verdict


def _verify_url(flags: VerifyFlags, url: str, model: str | None, *, as_json: bool) -> "Verdict":
    from cadenza.verification.over_http import NUM_REQUESTS, UrlOptions, remote_options, verify_url

    for given, is_given in (
        (f"the model {model}", model is not None),
        (f"--shape {flags.shape}", flags.shape is not None),
        ("--self-test", flags.self_test),
        ("--portable", flags.portable),
    ):
        if is_given:
            raise ConfigError(f"--url asks a running server, and {given} is for here; give one")
    options = UrlOptions(
        url=url,
        api_key=flags.api_key,
        cacert=flags.cacert,
        num_requests=flags.num_requests or NUM_REQUESTS,
        max_tokens=flags.max_tokens,
        seed=flags.seed,
        matrix=_matrix(flags, remote_options()),
    )
    with status_line("starting") as report:
        result = verify_url(options, report)
    lines = [f"{mode.name}: {mode.num_equal}/{mode.num_streams} equal" for mode in result.modes]
    lines += [f"not compared: {each}" for each in result.left_out]
    text = (*lines, *_closing_lines(result))
    show_result(as_object(_RESULT, result), text, as_json=as_json)
    return result.verdict


def _self_test(options: "VerifyOptions", *, as_json: bool) -> "Verdict":
    from cadenza.verification.self_test import self_test

    with status_line("starting") as report:
        tested = self_test(options, report)
    facts = {
        "verdict": tested.verdict,
        "passed": tested.verdict == "PASS",
        **asdict(tested),
        **{each: tested.named(each) for each in ("caught", "missed", "skipped")},
        "last_line": tested.last_line,
    }
    show_result(facts, _self_test_text(tested), as_json=as_json)
    return tested.verdict


def _options(flags: VerifyFlags, config: EngineConfig, model: str | None) -> "VerifyOptions":
    from cadenza.verification.option_matrix import OPTIONS
    from cadenza.verification.run import VerifyOptions

    matrix = _matrix(flags, OPTIONS)
    if flags.shape is not None and model is not None:
        raise ConfigError(f"both a model ({model}) and --shape {flags.shape} were given; give one")
    return VerifyOptions(
        model=model,
        shape=flags.shape,
        num_requests=flags.num_requests or 2 * (config.max_num_seqs or DEFAULT_MAX_NUM_SEQS),
        max_tokens=flags.max_tokens,
        seed=flags.seed,
        reference=flags.reference,
        matrix=matrix,
        config=config,
    )


def _matrix(flags: VerifyFlags, options: "tuple[Option, ...]") -> "OptionMatrix | None":
    from cadenza.verification.option_matrix import make_matrix

    if flags.options == "none":
        return None
    if flags.num_requests is not None:
        raise ConfigError(
            f"--num-requests {flags.num_requests} with --options all: the matrix sets the number "
            f"of requests; leave --num-requests out"
        )
    return make_matrix(options)


def _closing_lines(result: "VerifierResult") -> Iterator[str]:
    batched, sequential = result.batched_tokens_per_s, result.sequential_tokens_per_s
    ratio = batched / sequential if sequential else 0.0
    yield f"throughput: {batched:.0f} tok/s batched (vs {sequential:.0f} sequential, {ratio:.1f}x)"
    if result.shortfall is not None:
        yield f"note: {result.shortfall}"
    yield result.last_line


def _self_test_text(tested: "SelfTestResult") -> Iterator[str]:
    yield f"no fault: {tested.sound}"
    for each in sorted(tested.faults, key=lambda each: each.outcome):
        outcome = "MISSED" if each.outcome == "missed" else each.outcome
        why = f" ({each.why})" if each.why else ""
        yield f"{outcome}: {each.layer}: {each.name}{why}"
    if tested.note is not None:
        yield f"note: {tested.note}"
    yield tested.last_line


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAt:
    """The server that computes its own receipts again, if one is asked."""

    url: str | None = flag(
        None,
        "Ask the running server that gave them, which computes its own receipts again; --model is "
        "then one of its names.",
        metavar="http://…",
    )
    api_key: str | None = flag(
        None, "With --url: the server's API key.", metavar="KEY", has_variable=True
    )
    cacert: str | None = flag(None, f"With --url. {CACERT_HELP}", metavar="FILE")

    @property
    def link(self) -> ServerLink | None:
        """Raises ConfigError."""
        if self.url is not None:
            return ServerLink(url=self.url, api_key=self.api_key, cacert=self.cacert)
        if self.cacert is not None:
            raise ConfigError("--cacert changes nothing without --url; leave it out")
        return None


def replay(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="Receipts: JSON, or one a line.")
    ],
    *,
    model: ModelFlag = None,
    at: ReplayAt,
    json: JsonFlag = False,
) -> int:
    """Compute answers again from their receipts, each alone, and compare every bit.

    The receipt's fingerprint says how: types of activations, weights and KV, arithmetic, context.
    Prints for each receipt that it is equal, or the first token that differs and by how much, or
    the part of the fingerprint that does not fit. With --url a server does that with receipts that
    it gave itself since it was started. Exit code 0 when all are equal, 1 when not.
    """
    from cadenza.verification.replay import read_receipts, replay_receipts

    link = at.link
    receipts = [each for file in files for each in read_receipts(Path(file))]
    with status_line("replaying"):
        if link is None:
            verdicts = [*replay_receipts(model, receipts)]
        else:
            verdicts = _replay_at(link, receipts, model)
    for each in verdicts:
        if json:
            print(json_line({**asdict(each), "is_equal": each.is_equal}))
        elif each.is_equal:
            print(f"{each.source}: equal, {each.num_tokens} tokens")
        else:
            print("\n".join(f"{each.source}: {text}" for text in each.differences))
    return 0 if all(each.is_equal for each in verdicts) else CHECK_FAILED


def _replay_at(
    link: ServerLink, receipts: "list[NamedReceipt]", model: str | None
) -> "list[Replayed]":
    from cadenza.verification.remote_server import RemoteApi
    from cadenza.verification.replay import replay_at

    with closing(RemoteApi(link)) as api:
        return [*replay_at(api, receipts, model)]
