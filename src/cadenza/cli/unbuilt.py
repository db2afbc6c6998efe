"""Flags that other servers have and this one does not yet: each is refused by its own name.

Owns their names and the one value, if any, that asks for what there is anyway. Invariant: none of
them is accepted and ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Annotated

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class Unbuilt:
    """A flag without machinery; `given` is the value that changes nothing, None when any would."""

    what: str
    given: str | None = None
    aliases: tuple[str, ...] = ()
    is_switch: bool = False


UNBUILT: Mapping[str, Unbuilt] = {
    "quantization": Unbuilt(what="quantisation", given="none"),
    "gpu_memory_utilization": Unbuilt(what="a share of a GPU; use --kv-cache-memory-bytes"),
    "batching": Unbuilt(what="static batching", given="continuous"),
    "scheduling_policy": Unbuilt(
        what="another policy than fcfs", given="fcfs", aliases=("--scheduler-policy",)
    ),
    "admission": Unbuilt(what="another admission than balanced", given="balanced"),
    "scheduler_headroom_gb": Unbuilt(what="a headroom of memory"),
    "starvation_guard": Unbuilt(what="a guard against starvation; fcfs needs none"),
    "max_itl_ms": Unbuilt(what="a bound between tokens"),
    "prefix_cache_memory_share": Unbuilt(what="a share of memory for prefixes"),
    "chat_template": Unbuilt(what="another chat template than the model's"),
    "no_chat_template": Unbuilt(what="serving without the model's template", is_switch=True),
    "speculative_config": Unbuilt(what="speculative decoding"),
    "enable_auto_tool_choice": Unbuilt(what="calling tools", is_switch=True),
    "tool_call_parser": Unbuilt(what="calling tools"),
    "reasoning_parser": Unbuilt(what="parsing of reasoning"),
}


def _refusal(unbuilt: Unbuilt) -> Callable[[object], object]:
    def refuse(value: object) -> object:
        if value in (None, False, unbuilt.given):
            return value
        also = "" if unbuilt.given is None else f" (there is {unbuilt.given})"
        raise typer.BadParameter(f"{unbuilt.what}: not built yet{also}; leave the flag out")

    return refuse


def _field(name: str, unbuilt: Unbuilt) -> tuple[str, object, object]:
    option = typer.Option(
        "--" + name.replace("_", "-"),
        *unbuilt.aliases,
        envvar=f"CADENZA_{name.upper()}",
        hidden=True,
        callback=_refusal(unbuilt),
    )
    kind = bool if unbuilt.is_switch else str | None
    default = False if unbuilt.is_switch else None
    return name, Annotated[kind, option], field(default=default)


if TYPE_CHECKING:

    class UnbuiltFlags:
        """All of them as one group of flags."""

else:
    UnbuiltFlags = make_dataclass(
        "UnbuiltFlags",
        [_field(name, unbuilt) for name, unbuilt in UNBUILT.items()],
        frozen=True,
        slots=True,
        kw_only=True,
    )
