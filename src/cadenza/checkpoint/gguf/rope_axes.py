"""Positions of three axes in GGUF files (M-RoPE): `read_axes`.

The files say how many pairs of a head each axis has; in which order the pairs follow from the
architecture.

Source: llama.cpp's conversion/qwenvl.py, conversion/qwen3vl.py and src/llama-model.cpp.
"""

from cadenza.checkpoint.gguf.settings import Settings
from cadenza.checkpoint.rope_config import Sections, axes_of

ROPE_SECTIONS = "rope.dimension_sections"
VISION_KEYS = frozenset({ROPE_SECTIONS, "n_deepstack_layers"})
"""Of text models whose towers are in another file."""

_NUM_SECTIONS = 4
"""Of which the last is not used."""

_KINDS: dict[str, Sections] = {
    "qwen2vl": "joined",
    "qwen3vl": "interleaved",
    "qwen3vlmoe": "interleaved",
    "qwen35": "interleaved",
    "qwen35moe": "interleaved",
}


def read_axes(settings: Settings, num_pairs: int) -> tuple[int, ...]:
    """The axis of each pair of a head; () if the file names none.

    Raises CheckpointError.
    """
    kind = _KINDS.get(settings.architecture)
    if kind is None or not settings.has(ROPE_SECTIONS):
        return ()
    sections = settings.integers_of_layers(ROPE_SECTIONS, _NUM_SECTIONS)
    if sections is None or (kind == "joined" and sum(sections[:3]) != num_pairs):
        raise settings.wrong(ROPE_SECTIONS, f"{_NUM_SECTIONS} numbers, of {num_pairs} pairs")
    return axes_of(sections[:3], num_pairs, kind)
