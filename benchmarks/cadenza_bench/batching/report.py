"""The result of `cadenza bench batching`: its JSON object, text and charts. Invariant: bars are
shown with the ratio, the bar, and what the lengths and the measured rates allow, met or not.
"""

from collections.abc import Sequence

from cadenza.bench.serve_figures import Spread
from cadenza.cli.report import (
    Chart,
    Column,
    Columns,
    Result,
    Rows,
    Series,
    Text,
    as_table,
    counted,
    digits_text,
    keys,
    machine_text,
)
from cadenza_bench.batching.figures import Difference, ModeFigures
from cadenza_bench.batching.plan import BatchingOptions, BatchingPlan
from cadenza_bench.batching.rounds import BatchingResult


def _milliseconds(spread: Spread) -> str:
    values = (spread.mean_s, spread.p50_s, spread.p95_s, spread.p99_s)
    return " ".join(
        f"{1000 * each:.0f}" if each >= 0.1 else f"{1000 * each:.1f}" for each in values
    )


def _ratio(value: float) -> str:
    return f"{value:.2f}"


_MODE: Columns = (
    Column("load", read="load.label"),
    Column("mode", "mode"),
    Column("tok_s", "tok/s", show=digits_text),
    Column("gain", "gain", show=_ratio),
    Column("num_steps", "steps"),
    Column("step_gain", "step gain", show=_ratio),
    Column("ttft", "TTFT ms", show=_milliseconds),
    Column("itl", "ITL ms", show=_milliseconds),
    Column("tpot", "TPOT ms", show=_milliseconds),
    Column("clients", read="load.clients"),
    Column("request_rate", read="load.rate"),
    *keys("e2e", "tok_s_runs", "gains", "duration_s"),
    *keys("num_prompt_tokens", "num_output_tokens", "num_cached_tokens"),
)
_FULL: Columns = (
    Column(None, "mode", "mode"),
    Column("full_tok_s", "tok/s", show=digits_text),
    Column("full_gain", "gain", show=_ratio),
    Column("ideal_gain", "ideal", show=_ratio),
    Column("allowed_gain", "allowed", show=_ratio),
    Column("full_tokens_a_step", "tokens a step", show=digits_text),
    Column("full_step_gain", "step gain", show=_ratio),
    Column(None, "ideal", "ideal_gain", show=_ratio),
    *keys("full_tok_s_runs"),
)
_BAR: Columns = (
    Column("what", "bar"),
    Column("value", "of", show=digits_text),
    Column("base", "over", show=digits_text),
    Column("ratio", "ratio", show=_ratio),
    Column("required", "at least", show=_ratio),
    Column("verdict", "verdict"),
    Column("ideal", "ideal", show=_ratio),
    Column("allowed", "allowed", show=_ratio),
    Column("share_of_allowed", "of that"),
    Column("claim", "claimed elsewhere"),
    *keys("ratios", "error", "is_met"),
)


def batching_result(found: BatchingResult, options: BatchingOptions) -> Result:
    """The machine, the setting, one row for each load and mode, the bars, and whether all modes
    gave the same tokens. The exit code is 1 when two runs differ in a token or, where bars are to
    be checked, one is missed."""
    compared = found.compared
    is_missed = options.check and not compared.all_bars_met
    return Result(
        facts={
            "machine": found.machine,
            "workload": found.workload,
            "rates": compared.rates,
            "tokens_equal": compared.difference is None,
            "first_difference": compared.difference,
        },
        rows={
            "results": Rows(columns=(*_MODE, *_FULL), rows=compared.figures),
            "bars": Rows(columns=_BAR, rows=compared.bars),
        },
        text=_text(found),
        title=f"Batching: {found.workload['model']}",
        charts=lambda: batching_charts(found),
        exit_code=1 if compared.difference is not None or is_missed else 0,
    )


def _text(found: BatchingResult) -> Text:
    setting, plan, compared = found.workload, found.plan, found.compared
    yield machine_text(found.machine)
    yield (
        f"model: {setting['model']}, {setting['dtype']}, {setting['ops']} ops; {plan.rows} rows; "
        f"{_requests_text(plan)}; {counted(plan.repeats, 'round')}"
    )
    if compared.rates is not None:
        steps = compared.rates.decode_step_s
        yield (
            f"measured rates: {compared.rates.prefill_tok_s:.0f} prompt tokens/s; a decode step of "
            f"{' / '.join(map(str, steps))} rows: "
            f"{' / '.join(f'{1000 * each:.1f}' for each in steps.values())} ms"
        )
    for load in plan.loads:
        shown = [each for each in compared.figures if each.load == load]
        yield f"{load.label}:"
        yield as_table(_MODE, shown)
        if any(each.has_waits for each in shown):
            yield f"{load.label}, while requests wait for a row:"
            yield as_table(_FULL, shown)
    yield (
        "rates and steps are medians, ms: mean, p50, p95 and p99; gain: the tok/s of continuous "
        "batching over this mode's, and this mode's steps over those of continuous batching"
    )
    if any(each.ideal_gain is not None for each in compared.figures):
        yield (
            "while requests wait: until the last one gets a row; ideal: that gain by the lengths "
            "of answers alone; allowed: by the measured rates"
        )
    if compared.bars:
        yield as_table(_BAR, compared.bars)
        yield "of, over: medians of the rounds (TTFT in seconds); ratio: the one over the other"
    yield _tokens_text(found)


def _requests_text(plan: BatchingPlan) -> str:
    long = plan.long_answers
    parts = (
        counted(plan.num_requests, "request"),
        f"{plan.system_len} + " if plan.system_len else "",
        f"{_lens(plan.prompt_lens)} prompt tokens, {_lens(plan.output_lens)} new ones",
        "" if long is None else f", {long.length} of one in {long.every}",
    )
    return f"{parts[0]} of {''.join(parts[1:])}"


def _lens(bounds: tuple[int, int]) -> str:
    low, high = bounds
    return str(low) if low == high else f"{low} to {high}"


def _tokens_text(found: BatchingResult) -> str:
    different = found.compared.difference
    if different is not None:
        return _difference_text(different)
    runs = sum(len(each.runs) for each in found.compared.figures)
    return f"tokens: equal in all {counted(runs, 'run')}"


def _difference_text(found: Difference) -> str:
    return (
        f"tokens DIFFER: request {found.request}, token {found.position} of the answer is "
        f"{found.found} in {found.mode}, {found.load}, round {found.round}, and {found.expected} "
        f"in {found.expected_of}"
    )


def batching_charts(found: BatchingResult) -> list[Chart]:
    """Tokens a second and the first token by load and mode, what the modes lose, and the requests
    of a middle round over time."""
    figures, loads = found.compared.figures, found.plan.loads
    kinds = {
        "clients": [each for each in loads if each.clients is not None],
        "requests a second": [each for each in loads if each.rate is not None],
        "at once": [each for each in loads if each.is_saturated],
    }
    charts: list[Chart] = []
    for kind, some in kinds.items():
        if some:
            shown = [each for each in figures if each.load in some]
            charts += [_throughput_chart(kind, shown), _ttft_chart(kind, shown)]
    full = [each for each in figures if each.full_gain is not None]
    if full:
        charts.append(_gain_chart([each for each in full if each.load == full[-1].load]))
    middle = loads[len(loads) // 2]
    charts.append(_timeline([each for each in figures if each.load == middle]))
    return charts


def _throughput_chart(kind: str, figures: Sequence[ModeFigures]) -> Chart:
    return _by_load("throughput", "tokens a second", kind, [(each, each.tok_s) for each in figures])


def _ttft_chart(kind: str, figures: Sequence[ModeFigures]) -> Chart:
    times = [(each, each.ttft.mean_s) for each in figures if each.ttft is not None]
    return _by_load("ttft", "mean time to the first token, s", kind, times)


def _by_load(name: str, what: str, kind: str, values: Sequence[tuple[ModeFigures, float]]) -> Chart:
    loads = list(dict.fromkeys(each.load for each, _ in values))
    name = f"{name}_{kind.replace(' ', '_')}"
    if len(loads) == 1:
        (load,) = loads
        series = [Series(label=load.label, points=[(each.mode, value) for each, value in values])]
        title = f"{what}, {load.label}"
        return Chart(
            name=name, title=title, x_label="mode", y_label=what, series=series, kind="bar"
        )
    lines: dict[str, list[tuple[float, float]]] = {}
    for each, value in values:
        at = each.load.clients or each.load.rate or 0.0
        lines.setdefault(each.mode, []).append((at, value))
    series = [Series(label=mode, points=points) for mode, points in lines.items()]
    return Chart(name=name, title=what, x_label=kind, y_label=what, series=series, kind="line")


def _gain_chart(figures: Sequence[ModeFigures]) -> Chart:
    def bars(label: str, name: str) -> Series:
        return Series(label=label, points=[(each.mode, getattr(each, name)) for each in figures])

    return Chart(
        name="gain",
        title="tokens a second of continuous batching over each mode, while requests wait",
        x_label="mode",
        y_label="ratio",
        series=[
            bars("measured", "full_gain"),
            bars("ideal, by lengths", "ideal_gain"),
            bars("allowed, by measured rates", "allowed_gain"),
        ],
        kind="bar",
    )


def _timeline(figures: Sequence[ModeFigures]) -> Chart:
    series = [
        Series(
            label=each.mode,
            points=[
                (one.index, one.due_s, one.content_s[0], one.content_s[-1])
                for one in each.middle_run.requests
            ],
        )
        for each in figures
    ]
    return Chart(
        name="timeline",
        title=f"requests over time, {figures[0].load.label}",
        x_label="seconds",
        y_label="request",
        series=series,
        kind="timeline",
    )
