"""The result of `cadenza bench spec-prefill`: its JSON object, text and charts.

Invariant: where a baseline gives as many right answers as the draft model, the text says so.
"""

from collections.abc import Iterable
from typing import Any

from cadenza.cli.report import (
    Chart,
    Column,
    Columns,
    Result,
    Rows,
    Series,
    Text,
    as_table,
    digits_text,
    keys,
    machine_text,
)
from cadenza_bench.spec_prefill.measure import (
    CEILING,
    WAYS,
    LengthResult,
    SpecPrefillResult,
    TaskResult,
)


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _milliseconds(seconds: float) -> str:
    return digits_text(1000 * seconds)


def _likeness(way: str) -> Columns:
    def value(part: str) -> Any:
        def read(found: LengthResult) -> object:
            return getattr(found.likeness.get(way), part, None)

        return read

    name = way.replace("_", "+")
    return (
        Column(f"kl_{way}", f"KL {name}", value("kl"), show=_ratio),
        Column(f"top_1_{way}", "top-1", value("top_1"), show=_share),
    )


_LENGTH: Columns = (
    Column("input_len", "tokens"),
    Column("keep", "keep"),
    Column("kept_tokens", "kept"),
    Column("whole_ttft_s", "whole ms", "whole_s", show=_milliseconds),
    Column("thinned_ttft_s", "thinned ms", "thinned_s", show=_milliseconds),
    Column("ttft_ratio", "ratio", show=_ratio),
    Column("predicted_ratio", "predicted", show=_ratio),
    *(column for way in WAYS for column in _likeness(way)),
)
_TASK: Columns = (
    Column("task", "task"),
    Column("input_len", "tokens"),
    Column("keep", "keep"),
    Column("way", "kept by"),
    Column("whole", "whole", show=_share),
    Column("recall", "recall", show=_share),
    Column("right", "right", show=_share),
    Column("counts", None),
    *keys("samples", "by_depth"),
)


def spec_prefill_result(found: SpecPrefillResult) -> Result:
    """The machine, the setting, one row for each length and fraction, one for each task and way,
    and what follows of them."""
    return Result(
        facts={
            "machine": found.machine,
            "workload": found.workload,
            "beaten_by": found.beaten_by if _counted(found.tasks) else None,
        },
        rows={
            "results": Rows(columns=_LENGTH, rows=found.results),
            "tasks": Rows(columns=_TASK, rows=found.tasks),
        },
        text=_text(found),
        title=f"Sparse prefill: {found.workload['model']}",
        charts=lambda: spec_prefill_charts(found),
    )


def _counted(tasks: Iterable[TaskResult]) -> list[TaskResult]:
    return [each for each in tasks if each.counts]


def _text(found: SpecPrefillResult) -> Text:
    setting = found.workload
    yield machine_text(found.machine)
    yield (
        f"model: {setting['model']}, {setting['dtype']}, {setting['ops']} ops; "
        f"draft: {setting['draft']}"
    )
    yield as_table(_LENGTH if found.results[0].likeness else _TIMES, found.results)
    yield (
        "ratio: time to the first token of the whole prompt over that of the thinned one; "
        "predicted: by the shapes of the two models"
    )
    if not found.tasks:
        return
    yield (
        "KL: nats a token, at least, of answers of 32 tokens from those to whole prompts; top-1: "
        "tokens that stay the likeliest"
    )
    counted = _counted(found.tasks)
    left_out = sorted({each.task for each in found.tasks} - {each.task for each in counted})
    if counted:
        yield as_table(_TASK, counted)
    yield (
        "whole: right answers to whole prompts; recall: prompts of which all that is sought was "
        "kept; right: answers to thinned prompts"
    )
    if left_out:
        yield (
            f"not shown, since fewer than {_share(CEILING)} of the answers to whole prompts are "
            f"right at every length: {', '.join(left_out)}"
        )
    if counted:
        yield _verdict(found)


def _verdict(found: SpecPrefillResult) -> str:
    means = ", ".join(f"{way} {_share(found.mean_right(way))}" for way in WAYS)
    if found.beaten_by:
        beaten = " and ".join(found.beaten_by)
        return f"right answers: {means}; the draft model is no better than {beaten} here"
    return f"right answers: {means}"


_TIMES: Columns = _LENGTH[:7]


def spec_prefill_charts(found: SpecPrefillResult) -> list[Chart]:
    """The ratio by length, measured and predicted; right answers and recall by way and depth."""
    charts = [_ratio_chart(found)]
    deep = [each for each in _counted(found.tasks) if each.by_depth]
    for part, name in ((1, "right"), (0, "recall")):
        if deep:
            charts.append(_depth_chart(deep, part, name))
    return charts


def _ratio_chart(found: SpecPrefillResult) -> Chart:
    series: list[Series] = []
    for keep in sorted({each.keep for each in found.results}, reverse=True):
        own = [each for each in found.results if each.keep == keep]
        measured = [(each.input_len, each.ttft_ratio) for each in own]
        series.append(Series(label=f"keep {keep:g}", points=measured))
        predicted = [
            (each.input_len, each.predicted_ratio)
            for each in own
            if each.predicted_ratio is not None
        ]
        if predicted:
            series.append(Series(label=f"keep {keep:g}, predicted", points=predicted))
    return Chart(
        name="ttft_ratio",
        title="time to the first token, whole over thinned",
        x_label="prompt tokens",
        y_label="ratio",
        series=series,
        kind="line",
    )


def _depth_chart(tasks: list[TaskResult], part: int, name: str) -> Chart:
    """Means over tasks, lengths and fractions, by the depth of what is sought."""
    series: list[Series] = []
    for way in WAYS:
        own = [each for each in tasks if each.way == way]
        depths = sorted({float(depth) for each in own for depth in each.by_depth})
        points: list[tuple[float, float]] = []
        for depth in depths:
            found = [each.by_depth[f"{depth:g}"][part] for each in own]
            points.append((depth, sum(found) / len(found)))
        series.append(Series(label=way, points=points))
    return Chart(
        name=name,
        title=f"{name} by depth",
        x_label="depth in the text",
        y_label=name,
        series=series,
        kind="line",
    )
