"""The settings of a config.json that give layers different kinds: `read_layer_kinds`.

Invariant: layer patterns are the shortest that repeat to the layers' kinds, so that equivalent
files give equal patterns.
"""

from collections.abc import Sequence

from cadenza.checkpoint.json_object import JsonObject, shorten
from cadenza.checkpoint.model_config import LayerKind
from cadenza.checkpoint.rope_config import MAX_POSITIONS
from cadenza.errors import CheckpointError

FULL, SLIDING = "full_attention", "sliding_attention"

LAYER_KEYS = frozenset({"sliding_window", "layer_types"})


def read_window(raw: JsonObject, default: int | None) -> int | None:
    """`sliding_window` in tokens; `default` if the key is absent, None if it is null."""
    if "sliding_window" not in raw.values:
        return default
    return raw.integer("sliding_window", 1, MAX_POSITIONS) if raw.has("sliding_window") else None


def read_used_window(raw: JsonObject, default: int | None) -> int | None:
    """`read_window`, or None unless `use_sliding_window` is set."""
    return read_window(raw, default) if raw.flag("use_sliding_window", False) else None


def read_layer_kinds(
    raw: JsonObject, are_sliding: Sequence[bool], window: int | None
) -> list[LayerKind]:
    """Each layer's kind by `layer_types`, or by `are_sliding` (one per layer) if that is absent.

    Raises CheckpointError for other types, and if there is a sliding layer but no window.
    """
    default: list[object] = [SLIDING if is_sliding else FULL for is_sliding in are_sliding]
    types = raw.items_of("layer_types") if raw.has("layer_types") else default
    if len(types) < len(default):
        raise CheckpointError(
            f"{raw.where}: layer_types has {len(types)} entries for {len(default)} layers; "
            f"correct one of the two"
        )
    types = types[: len(default)]
    odd = [entry for entry in types if entry not in (FULL, SLIDING)]
    if odd:
        raise CheckpointError(
            f"{raw.where}: layer_types names {shorten(odd[0])}; supported are {FULL} and {SLIDING}"
        )
    if window is None and SLIDING in types:
        raise CheckpointError(
            f"{raw.where}: layer_types has {SLIDING}, but sliding_window is not set; "
            f"correct one of the two"
        )
    return [LayerKind(window=window if kind == SLIDING else None) for kind in types]


def shortest_pattern(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest pattern that repeats to `kinds`."""
    for length in range(1, len(kinds)):
        if all(kind == kinds[index % length] for index, kind in enumerate(kinds)):
            return tuple(kinds[:length])
    return tuple(kinds)
