"""What run.sh's steps have shown, as a table for people: `report.md`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]


# Of `cadenza verify`, with their exit statuses.
VERDICTS = {"PASS": 0, "MISMATCH": 1, "NOT SHOWN": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a step's result is read.

    Args:
        figure: what to show of the object that the step printed.
        near: what the figure should be near; of rates, on an H100.
        look: where to look if it is not, or if the step did not pass.
        needs: a member without which the step has shown nothing.
    """

    figure: Callable[[Any], str]
    near: str
    look: str
    needs: str | None = None


def outcome(name: str, result: Result | None) -> str:
    """`passed`, a verdict of `verify`, or what else became of a step."""
    if result is None:
        return "not run yet"
    if (skipped := result.get("skipped")) is not None:
        return f"skipped: {skipped}"
    if result["exit"] is None:
        return f"cut after {result['seconds']} s"
    found, needs = result.get("found") or {}, READINGS[name].needs
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    verdict = found.get("verdict")
    if result["exit"] == VERDICTS.get(verdict):
        return str(verdict)
    if result["exit"] != 0:
        return f"failed, exit {result['exit']}"
    if not found:
        return "failed: it printed no result"
    if needs is not None and not found.get(needs):
        return f"failed: no {needs}"
    return "passed" if found.get("passed", True) else "failed"


def has_passed(name: str, result: Result | None) -> bool:
    return outcome(name, result) in ("passed", "PASS")


def format_report(names: Sequence[str], report: Mapping[str, Result], compiled: str) -> str:
    return "".join(f"{line}\n" for line in _lines(names, report, compiled))


def _lines(names: Sequence[str], report: Mapping[str, Result], compiled: str) -> Iterator[str]:
    passed = [name for name in names if has_passed(name, report.get(name))]
    yield f"# {len(passed)} of {len(names)} steps passed"
    yield ""
    yield "`report.json` has what each step printed, and the last lines of one that failed."
    yield ""
    yield "| step | outcome | figure | should be near | where to look if not |"
    yield "| --- | --- | --- | --- | --- |"
    for name in names:
        result, reading = report.get(name), READINGS[name]
        found = None if result is None else result.get("found")
        figure = "" if found is None else _figure(reading, found)
        if name == "kernels" and name not in passed:
            figure = compiled
        cells = (name, outcome(name, result), figure, reading.near, reading.look)
        yield f"| {' | '.join(each.replace('|', '/') for each in cells)} |"


def _figure(reading: Reading, found: Any) -> str:
    try:
        return reading.figure(found)
    except (KeyError, TypeError, AttributeError):
        return ""


def _joined(values: Sequence[Any], unit: str = "") -> str:
    return " / ".join(f"{each:,.4g}" for each in values) + unit


def _throughput(found: Any) -> str:
    results = found["results"]
    parts = [f"{_joined([each['concurrency'] for each in results])} rows"]
    for kind in ("decode", "prefill"):
        rates = _joined([round(each[f"{kind}_tok_s"]) for each in results], " tok/s")
        shares = [each.get(f"{kind}_share_of_bound") for each in results]
        known = all(each is not None for each in shares)
        share = f" ({_joined([round(100 * each) for each in shares], ' %')})" if known else ""
        parts.append(f"{kind} {rates}{share}")
    return ", ".join(parts)


def _proof(found: Any) -> str:
    proof = found["kernel_proof"]
    operations, sizes = len(proof["operations"]), len(proof["step_sizes"])
    return f"{operations} operations in {sizes} sizes of steps, {proof['elapsed_s']:.1f} s"


def _host(found: Any) -> str:
    return (
        f"{_joined(found['host_ms'])} of {_joined(found['step_ms'])} ms at "
        f"{' / '.join(found['rows'])} rows"
    )


def _families(found: Any) -> str:
    lines = found["last_lines"]
    passed = [name for name, line in lines.items() if " PASS " in f"{line} "]
    others = [f"{name}: {line}" for name, line in lines.items() if name not in passed]
    return "; ".join([f"{len(passed)} of {len(lines)} PASS", *others])


def _profile(found: Any) -> str:
    top = [f"{name} {share:.3g} %" for name, share in found["top"]]
    return f"{found['case']}: {', '.join(top)}"


_VERIFY = Reading(
    figure=lambda found: str(found["last_line"]),
    near="PASS",
    look="MISMATCH: `mismatch` has the stream and its first token that differs, try `--ops "
    "reference`; NOT SHOWN: `missing` has what did not happen, no bit differed",
)
_SHARES = (
    "`proof` has under `products` which rows cublasLt computes; then `attention`, `host share`"
)

# By the names of steps.
READINGS: Mapping[str, Reading] = {
    "kernels": Reading(
        figure=lambda found: (
            f"{found['library']}: {' '.join(found['targets'])}; with faults: {found['faults']}"
        ),
        near="",
        look="`build.log`; after a cut run the script again, which goes on",
    ),
    "proof": Reading(
        figure=_proof,
        near="every operation; at most 20 s",
        look="the last lines name the operation or the weight's shape that is not exact",
        needs="kernel_proof",
    ),
    "verify bfloat16": _VERIFY,
    "verify float32": _VERIFY,
    "verify int8": _VERIFY,
    "self-test": Reading(
        figure=lambda found: str(found["last_line"]),
        near="PASS, every fault caught",
        look="`missed` names faults; without a library with faults nothing is tested",
    ),
    "verify families": Reading(
        figure=_families, near="all PASS", look="`cadenza verify --shape` of the one that differs"
    ),
    "weights of 1B and 135M": Reading(
        figure=lambda found: "written", near="3 GB", look="space where the cache folder is"
    ),
    "weights of 8B": Reading(
        figure=lambda found: "written", near="16 GB", look="space where `OUT` is"
    ),
    "weights of 8B, 8 layers": Reading(
        figure=lambda found: "written", near="6 GB", look="space where `OUT` is"
    ),
    "throughput 8B": Reading(
        figure=_throughput,
        near="decode 160 / 1,230 / 6,700 / 12,400 tok/s; on any card 86 / 88 / 87 / 82 %, prefill "
        "60 % of the bound",
        look=_SHARES,
    ),
    "throughput 1B": Reading(
        figure=_throughput, near="decode 800 / 5,000 / 20,000 tok/s at 1 / 8 / 64", look=_SHARES
    ),
    "throughput 135M": Reading(
        figure=_throughput, near="no goal", look="`host share`: a small model's step is short"
    ),
    "attention": Reading(
        figure=lambda found: (
            f"{_joined(found['percent'])} %, {_joined(found['us'])} µs at {' / '.join(found['at'])}"
        ),
        near="88 % of the read rate at 64×4000, 60 % at 8×1000",
        look="csrc/cuda/attention.cu",
    ),
    "served 135M": Reading(
        figure=lambda found: f"{_joined(found['tok_s'])} tok/s, ready in {found['ready_s']} s",
        near="90 % of `throughput 135M` at 64; ready in 20 s",
        look="`void` tells of clients that took too much; then `host share`",
    ),
    "host share": Reading(
        figure=_host,
        near="the host's part below the step's",
        look="whether the step is one graph: csrc/cuda/graphs.cu",
    ),
    "kernel profile": Reading(
        figure=_profile,
        near="products first, then attention",
        look="`kernels.json` has every kernel of every case",
        needs="top",
    ),
    "kernel tests": Reading(
        figure=lambda found: " ".join(found["last"]),
        near="all passed",
        look="`failed` has the names of tests, `output` their errors",
    ),
}
