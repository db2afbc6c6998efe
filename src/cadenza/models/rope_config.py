"""The rotary position settings of a config.json: `RopeConfig`, `read_rope` and `format_rope`. A
`RopeConfig` has all defaults filled in, so that equivalent files give equal values. Sources: Su et
al., 2021 (rotary embedding); Peng et al., 2023 (YaRN); Ding et al., 2024 (LongRoPE)."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from cadenza.errors import CheckpointError
from cadenza.json_object import JsonObject, is_finite_number, shorten
from cadenza.models.host_math import log

MAX_POSITIONS = 1 << 24

_ORIGINAL = "original_max_position_embeddings"
_QUERY_BETA = "llama_4_scaling_beta"
_REFUSED_KEYS = ("mrope_section", "short_mscale", "long_mscale", _QUERY_BETA, "alpha")
_SECTIONS, _INTERLEAVED = "mrope_section", "mrope_interleaved"
_NUM_AXES = 3
_MAX_FACTOR = 1e6

# How the pairs of a head are divided among the axes of positions (M-RoPE): alternating, as long as
# each has some left, or all of one axis after all of another
Sections = Literal["interleaved", "joined"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Divides all frequencies by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high ones kept, and blended
    between the wavelengths `original_max_position_embeddings / low_freq_factor` and
    `original_max_position_embeddings / high_freq_factor` (in tokens)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRopeScaling:
    """YaRN's scaling. Frequencies with more than `beta_fast` rotations in the original length are
    kept, those with fewer than `beta_slow` are divided by `factor`, with a linear ramp over the
    pairs between; `truncate` rounds the ramp's ends to integers. Cosines and sines are multiplied
    by `attention_factor`, and the queries of position p by 1 + query_beta * ln(1 + floor(p /
    original length)). Families with latents multiply scores by a magnitude of `mscale_all_dim`."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    query_beta: float = 0.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE's scaling: divides each pair's frequency by its own factor: of `short_factor` if
    `max_model_len` is at most the original length, else of `long_factor`. Cosines and sines are
    multiplied by `attention_factor` in both cases."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProportionalRopeScaling:
    """Gemma 4's rope: the first `num_pairs` pairs of a head have the frequencies that they would
    have if all rotated, divided by `factor`; the others do not rotate."""

    num_pairs: int
    factor: float


RopeScaling = (
    LinearRopeScaling
    | Llama3RopeScaling
    | YarnRopeScaling
    | LongRopeScaling
    | ProportionalRopeScaling
)

_NAME_OF_SCALING: dict[type, str] = {
    LinearRopeScaling: "linear",
    Llama3RopeScaling: "llama3",
    YarnRopeScaling: "yarn",
    LongRopeScaling: "longrope",
    ProportionalRopeScaling: "proportional",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions over the first `rotary_dim` values of a head. Value i is paired with i +
    rotary_dim / 2 (not with its neighbour). `axes` are those of the pairs, if positions have three
    coordinates (time, height, width), which differ within images: 0, 1 or 2 for each of the
    rotary_dim / 2 pairs. They are equal in text."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()

    @property
    def has_query_factors(self) -> bool:
        return isinstance(self.scaling, YarnRopeScaling) and self.scaling.query_beta != 0.0

    @property
    def attention_factor(self) -> float:
        if isinstance(self.scaling, YarnRopeScaling | LongRopeScaling):
            return self.scaling.attention_factor
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeRules:
    """A family's defaults and rules for reading rope settings."""

    head_dim: int
    max_positions: int
    default_theta: float = 10_000.0
    theta_key: str = "rope_theta"
    # the original length if it is not set at the file's top level; None takes the one in the
    # scaling, or else `max_positions`
    default_original: int | None = None
    may_be_partial: bool = False  # `partial_rotary_factor` may be below 1
    may_scale_queries: bool = False  # `llama_4_scaling_beta` may be set, with YaRN
    default_share: float = 1.0  # of `partial_rotary_factor`
    # positions may have several coordinates (`mrope_section`), which are equal in text, so that its
    # rope is the plain one
    sections: Sections | None = None
    aliases: tuple[tuple[str, str], ...] = ()  # (alias, rope type) pairs


def read_rope(raw: JsonObject, rules: RopeRules) -> RopeConfig:
    """The rope of all layers from its old keys, its new ones, or both if they agree. Raises
    `CheckpointError`."""
    sources = [
        source
        for source in (raw.child("rope_parameters"), raw.child("rope_scaling"))
        if source is not None
    ]
    for source in sources:
        if any(isinstance(value, dict) for value in source.values.values()):
            raise CheckpointError(
                f"{source.where} has an entry per layer type; models of this type support only one "
                f"for all layers"
            )
    readings = [read_rope_entry(raw, source, rules) for source in sources]
    if not readings:
        return read_rope_entry(raw, JsonObject({}, raw.where), rules)
    if any(reading != readings[0] for reading in readings):
        raise CheckpointError(
            f"{raw.where}: rope_parameters and rope_scaling disagree; remove the wrong one"
        )
    return readings[0]


def read_rope_entry(raw: JsonObject, source: JsonObject, rules: RopeRules) -> RopeConfig:
    """The rope of one entry; the file's top level gives missing values."""
    for key in _REFUSED_KEYS:
        is_read = key == _QUERY_BETA and rules.may_scale_queries
        is_read |= key == _SECTIONS and rules.sections is not None
        if source.has(key) and not is_read:
            raise CheckpointError(
                f"{source.where}: {key} is set, which is not supported; use another checkpoint"
            )
    theta = _read_theta(raw, source, rules)
    kind = source.text("rope_type") or source.text("type") or "default"
    kind = dict(rules.aliases).get(kind, kind)
    if kind == "proportional":
        return RopeConfig(
            theta=theta, rotary_dim=rules.head_dim, scaling=_read_proportional(source, rules)
        )
    rotary_dim = _read_rotary_dim(raw, source, rules)
    scaling = _read_scaling(raw, source, rules, kind=kind, rotary_dim=rotary_dim)
    if isinstance(scaling, YarnRopeScaling) and theta <= 1.0:
        raise source.wrong("rope_theta", "above 1 for a rope of type yarn")
    if source.has(_QUERY_BETA) and not isinstance(scaling, YarnRopeScaling):
        raise source.wrong(_QUERY_BETA, "absent for a rope that is not of type yarn")
    axes = _read_axes(source, rules, rotary_dim)
    return RopeConfig(theta=theta, rotary_dim=rotary_dim, scaling=scaling, axes=axes)


def axes_of(sections: Sequence[int], num_pairs: int, kind: Sections) -> tuple[int, ...]:
    """The axis of each pair of a head, of `sections` pairs for time, height and width."""
    if kind == "joined":
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))[:num_pairs]
    limits = [_NUM_AXES * count for count in sections]
    pairs = ((pair, pair % _NUM_AXES) for pair in range(num_pairs))
    return tuple(axis if pair < limits[axis] else 0 for pair, axis in pairs)


def _read_axes(source: JsonObject, rules: RopeRules, rotary_dim: int) -> tuple[int, ...]:
    if rules.sections is None or not source.has(_SECTIONS):
        return ()
    if source.has(_INTERLEAVED) and source.flag(_INTERLEAVED, True) != (
        rules.sections == "interleaved"
    ):
        raise source.wrong(_INTERLEAVED, "absent, or as in other models of this type")
    sections: list[int] = []
    for value in source.items_of(_SECTIONS):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= rotary_dim:
            raise source.wrong(_SECTIONS, "a list of three numbers of pairs")
        sections.append(value)
    if len(sections) != _NUM_AXES:
        raise source.wrong(_SECTIONS, "a list of three numbers of pairs")
    if rules.sections == "joined" and sum(sections) != rotary_dim // 2:
        raise source.wrong(_SECTIONS, f"three numbers whose sum is {rotary_dim // 2}")
    return axes_of(sections, rotary_dim // 2, rules.sections)


def format_rope(rope: RopeConfig, head_dim: int) -> dict[str, object]:
    """The `rope_parameters` from which `read_rope` restores `rope`."""
    if isinstance(rope.scaling, ProportionalRopeScaling):
        share = _share_of(2 * rope.scaling.num_pairs, head_dim)
        entry = {"partial_rotary_factor": share, "factor": rope.scaling.factor}
        return {"rope_type": "proportional", "rope_theta": rope.theta, **entry}
    if rope.scaling is None:
        values: dict[str, object] = {"rope_type": "default"}
    else:
        values = {"rope_type": _NAME_OF_SCALING[type(rope.scaling)], **asdict(rope.scaling)}
    if (beta := values.pop("query_beta", 0.0)) != 0.0:
        values[_QUERY_BETA] = beta
    if isinstance(rope.scaling, LongRopeScaling):
        values["short_factor"] = list(rope.scaling.short_factor)
        values["long_factor"] = list(rope.scaling.long_factor)
    if isinstance(rope.scaling, YarnRopeScaling) and not rope.scaling.mscale_all_dim:
        del values["mscale_all_dim"]
    values["rope_theta"] = rope.theta
    if rope.axes:
        values[_SECTIONS] = [rope.axes.count(axis) for axis in range(_NUM_AXES)]
        if list(rope.axes) != sorted(rope.axes):
            values[_INTERLEAVED] = True
    if rope.rotary_dim != head_dim:
        values["partial_rotary_factor"] = _share_of(rope.rotary_dim, head_dim)
    return values


def _share_of(rotated: int, head_dim: int) -> float:
    """The `partial_rotary_factor` that gives so many values of a head."""
    share = rotated / head_dim
    return math.nextafter(share, 1.0) if int(head_dim * share) < rotated else share


def _read_proportional(source: JsonObject, rules: RopeRules) -> ProportionalRopeScaling:
    share = source.number("partial_rotary_factor", 0.0, 1.0, 1.0)
    num_pairs = int(share * rules.head_dim // 2)
    return ProportionalRopeScaling(
        num_pairs=num_pairs, factor=source.number("factor", 1.0, _MAX_FACTOR, 1.0)
    )


def _read_theta(raw: JsonObject, source: JsonObject, rules: RopeRules) -> float:
    key = rules.theta_key
    outer = raw.number(key, 1.0, 1e15, rules.default_theta)
    theta = source.number("rope_theta", 1.0, 1e15, outer)
    if raw.has(key) and theta != outer:
        raise CheckpointError(
            f"{raw.where}: {key} is {outer:g}, but {theta:g} in {source.where}; "
            f"correct one of the two"
        )
    return theta


def _read_rotary_dim(raw: JsonObject, source: JsonObject, rules: RopeRules) -> int:
    key = "partial_rotary_factor"
    holder = source if source.has(key) else raw
    share = holder.number(key, 0.0, 1.0, rules.default_share)
    if share != 1.0 and not rules.may_be_partial:
        raise CheckpointError(
            f"{holder.where}: {key} is {shorten(holder.get(key))}; supported is 1"
        )
    rotary_dim = int(rules.head_dim * share)
    if rotary_dim % 2 or rotary_dim == 0:
        raise CheckpointError(
            f"{holder.where}: {key} {share:g} rotates {rotary_dim} of {rules.head_dim} values; "
            f"rotary positions need an even number of at least 2"
        )
    return rotary_dim


def _read_scaling(
    raw: JsonObject, source: JsonObject, rules: RopeRules, *, kind: str, rotary_dim: int
) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(factor=source.number("factor", 1.0, _MAX_FACTOR))
    if kind == "llama3":
        return _read_llama3(source, _read_original(raw, source, rules))
    if kind == "yarn":
        return _read_yarn(source, _read_original(raw, source, rules), rules)
    if kind == "longrope":
        original = _read_original(raw, source, rules)
        return _read_longrope(source, original, rules, rotary_dim=rotary_dim)
    why = "a token's keys would depend on the length of its request; " if kind == "dynamic" else ""
    raise CheckpointError(
        f"{source.where}: rope type {shorten(kind)} is not supported; {why}"
        f"supported are default, {', '.join(_NAME_OF_SCALING.values())}"
    )


def _read_original(raw: JsonObject, source: JsonObject, rules: RopeRules) -> int:
    """The original context length; the file's top level takes precedence."""
    if raw.has(_ORIGINAL):
        return raw.integer(_ORIGINAL, 1, MAX_POSITIONS)
    if rules.default_original is not None:
        return rules.default_original
    return source.integer(_ORIGINAL, 1, MAX_POSITIONS, rules.max_positions)


def _read_llama3(source: JsonObject, original: int) -> Llama3RopeScaling:
    scaling = Llama3RopeScaling(
        factor=source.number("factor", 1.0, _MAX_FACTOR),
        low_freq_factor=source.number("low_freq_factor", 1e-6, 1e6),
        high_freq_factor=source.number("high_freq_factor", 1e-6, 1e6),
        original_max_position_embeddings=original,
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise CheckpointError(
            f"{source.where}: high_freq_factor {scaling.high_freq_factor:g} is not above "
            f"low_freq_factor {scaling.low_freq_factor:g}; correct one of the two"
        )
    return scaling


def _read_yarn(source: JsonObject, original: int, rules: RopeRules) -> YarnRopeScaling:
    factor = _read_factor(source, original, rules)
    scaling = YarnRopeScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=source.number(
            "attention_factor", 1e-3, 1e3, _yarn_attention_factor(source, factor)
        ),
        beta_fast=source.number("beta_fast", 1e-6, 1e6, 32.0),
        beta_slow=source.number("beta_slow", 1e-6, 1e6, 1.0),
        truncate=source.flag("truncate", True),
        query_beta=source.number(_QUERY_BETA, 0.0, 1e3, 0.0),
        mscale_all_dim=source.number("mscale_all_dim", 0.0, 1e3, 0.0),
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise CheckpointError(
            f"{source.where}: beta_fast {scaling.beta_fast:g} is below beta_slow "
            f"{scaling.beta_slow:g}; correct one of the two"
        )
    return scaling


def _yarn_attention_factor(source: JsonObject, factor: float) -> float:
    """YaRN's default attention factor; a ratio if `mscale` and `mscale_all_dim` are both set."""
    mscale = source.number("mscale", 0.0, 1e3, 0.0)
    mscale_all_dim = source.number("mscale_all_dim", 0.0, 1e3, 0.0)

    def magnitude(weight: float) -> float:
        return 0.1 * weight * log(factor) + 1.0

    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)


def _read_longrope(
    source: JsonObject, original: int, rules: RopeRules, *, rotary_dim: int
) -> LongRopeScaling:
    factor = _read_factor(source, original, rules)
    default = None
    if factor <= 1.0:
        default = 1.0
    elif original > 1:
        default = math.sqrt(1.0 + log(factor) / log(original))
    return LongRopeScaling(
        short_factor=_read_factors(source, "short_factor", rotary_dim // 2),
        long_factor=_read_factors(source, "long_factor", rotary_dim // 2),
        original_max_position_embeddings=original,
        attention_factor=source.number("attention_factor", 1e-3, 1e3, default),
    )


def _read_factor(source: JsonObject, original: int, rules: RopeRules) -> float:
    """`factor`, or else the ratio of the context length to the original one."""
    if source.has("factor"):
        return source.number("factor", 1.0, _MAX_FACTOR)
    return max(1.0, rules.max_positions / original)


def _read_factors(source: JsonObject, key: str, count: int) -> tuple[float, ...]:
    factors: list[float] = []
    for value in source.items_of(key):
        if not is_finite_number(value) or not 1e-6 <= value <= _MAX_FACTOR:
            raise source.wrong(key, f"a list of {count} numbers from 1e-06 to {_MAX_FACTOR:g}")
        factors.append(float(value))
    if len(factors) != count:
        raise CheckpointError(
            f"{source.where}: {key} has {len(factors)} numbers; a rope of {2 * count} values "
            f"needs {count}"
        )
    return tuple(factors)
