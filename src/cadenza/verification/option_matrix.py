"""The matrix of sampling options: requests that cover every pair of values of two options, among
them forms of answers. Invariants: a pure function of the workload; no request bans every token;
stop tokens and bad words are allowed by the other options, so that they do occur; a request that
allows `Forms.going_on` always has a token that may follow."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from cadenza.structured import CompileConstraint, ConstraintSpec, StructuredOutput
from cadenza.text.constraints.token_constraint import ConstraintCompiler
from cadenza.text.schemas.grammar import grammar_of
from cadenza.verification.workload import Arrival

COMPILE_S = 60.0

# Each a token by itself, with which every form can be written.
CHARACTERS = 'abcdefghijklmnopqrstuvwxyz0123456789 "{}:,'

# Text that must follow is allowed in the tokens that the tokenizer makes of it, and no others. So
# names of members are single letters, and letters and digits take turns in the choices.
_WORD = {"type": "string", "pattern": "^[a-z]{6,}$"}

JSON_FORMS = (
    StructuredOutput(
        json={
            "type": "object",
            "properties": {"w": _WORD, "i": {"type": "integer"}},
            "required": ["w", "i"],
            "additionalProperties": False,
        },
        whitespace="any",  # else a name is followed by tokens of two characters only
    ),
    StructuredOutput(json_object=True),
)
TEXT_FORMS = (
    StructuredOutput(regex="[a-z0-9 ]{16,}"),
    StructuredOutput(choice=["q7x2k9v4j1z8w3y5", "q7x2k8m1b6n3c5l0"]),
    StructuredOutput(grammar='start: WORD ("," WORD)+ "," start\nWORD: /[a-z]{4,9}/'),
    StructuredOutput(grammar='root ::= ("a" [0-9]+ " ")+ root'),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """`compile`: of constraints that were compiled before, so that each is there at once;
    `going_on`: the tokens of `CHARACTERS`."""

    compile: CompileConstraint
    going_on: frozenset[int]

    def constrain(self, arrivals: Sequence[Arrival]) -> tuple[Arrival, ...]:
        """Every second one has a form."""
        forms = (*JSON_FORMS, *TEXT_FORMS)
        return tuple(
            each.asking(constraint=spec_of(forms[i // 2 % 6])) if i % 2 else each
            for i, each in enumerate(arrivals)
        )


def make_forms(compiler: ConstraintCompiler | None) -> Forms | None:
    """None for a model whose tokens are not known, or lack one of the characters."""
    if compiler is None or not compiler.has_loaded():
        return None
    for form in (*JSON_FORMS, *TEXT_FORMS):
        assert compiler.compile(spec_of(form)).result(COMPILE_S) is not None
    single = "".join(rf"\{each}" if each in "{}" else each for each in CHARACTERS)
    constraint = compiler.compile(spec_of(StructuredOutput(regex=f"[{single}]"))).result(COMPILE_S)
    assert constraint is not None
    mask = int.from_bytes(constraint.allowed(), "little")
    going_on = frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)
    if len(going_on) < len(CHARACTERS):
        return None
    return Forms(compile=compiler.compile, going_on=going_on)


def spec_of(form: StructuredOutput) -> ConstraintSpec:
    return ConstraintSpec(grammar=grammar_of(form))


Pair = tuple[int, int, int, int]  # (factor, its level, a later factor, its level)

Row = tuple[int, ...]  # one level per factor


def all_pairs(num_levels: Sequence[int]) -> list[Pair]:
    return [
        (left, one, right, other)
        for left, right in combinations(range(len(num_levels)), 2)
        for one in range(num_levels[left])
        for other in range(num_levels[right])
    ]


def missing_pairs(num_levels: Sequence[int], rows: Iterable[Row]) -> list[Pair]:
    found = {pair for row in rows for pair in _pairs_of(row)}
    return [pair for pair in all_pairs(num_levels) if pair not in found]


def covering_rows(num_levels: Sequence[int], *, times: int) -> tuple[Row, ...]:
    """Rows, of a level for each factor, that contain every pair of levels of two factors at least
    `times` times. Each starts with the pair that is missing most often, then adds for each factor
    the level whose pairs with the levels chosen so far are. The order of factors and levels rotates
    from row to row, so that ties are broken differently."""
    wanted = dict.fromkeys(all_pairs(num_levels), times)
    rows: list[Row] = []
    while max(wanted.values(), default=0) > 0:
        row = _next_row(num_levels, wanted, turn=len(rows))
        rows.append(row)
        for pair in _pairs_of(row):
            wanted[pair] -= 1
    return tuple(rows)


def _next_row(num_levels: Sequence[int], wanted: dict[Pair, int], turn: int) -> Row:
    left, one, right, other = max(wanted, key=lambda pair: wanted[pair])
    chosen = {left: one, right: other}
    num_factors = len(num_levels)
    for offset in range(num_factors):
        factor = (turn + offset) % num_factors
        if factor in chosen:
            continue
        wants = [_want(wanted, chosen, factor, level) for level in range(num_levels[factor])]
        turned = [(turn + step) % len(wants) for step in range(len(wants))]
        chosen[factor] = max(turned, key=wants.__getitem__)
    return tuple(chosen[factor] for factor in range(num_factors))


def _want(wanted: dict[Pair, int], chosen: dict[int, int], factor: int, level: int) -> int:
    total = 0
    for other, its_level in chosen.items():
        ordered = (factor, level, other, its_level)
        pair = ordered if factor < other else (other, its_level, factor, level)
        total += max(0, wanted[pair])
    return total


def _pairs_of(row: Row) -> list[Pair]:
    return [
        (left, row[left], right, row[right]) for left, right in combinations(range(len(row)), 2)
    ]


TIMES = 15  # requests per pair, so that a pair also occurs where no other option hides its effect

BAD_WORD_FIELD = "bad_word_token_ids"
FORM_FIELD = "constraint"


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixVocabulary:
    """`going_on`: `Forms.going_on`, needed with `FORM_FIELD`. `words`: of bad words; empty: any
    tokens."""

    size: int
    eos_token_ids: tuple[int, ...]
    going_on: frozenset[int] = frozenset()
    words: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSets:
    """Disjoint sets of tokens of one request. `free` ones are never all banned, so that some token
    can always be sampled."""

    free: tuple[int, ...]
    stops: tuple[int, ...]
    bad: tuple[int, ...]
    ends: tuple[int, ...]
    vocab_size: int
    seed: int
    text_form: StructuredOutput
    json_form: StructuredOutput


Level = Callable[[TokenSets], object]


@dataclass(frozen=True, slots=True)
class Option:
    """A request field and its values (levels); the first level is the default, if it has one."""

    name: str
    levels: tuple[Level, ...]


def _fixed(name: str, *values: object) -> Option:
    return Option(name, tuple((lambda _, value=value: value) for value in values))


def _few(sets: TokenSets) -> tuple[int, ...]:
    return tuple(sorted((*sets.free, *sets.stops, *sets.bad, *sets.ends)))


def _half(sets: TokenSets) -> tuple[int, ...]:
    return tuple(sorted({*_few(sets), *range(0, sets.vocab_size, 2)}))


def _bad_pair(sets: TokenSets) -> tuple[tuple[int, ...], ...]:
    """A word of two tokens, and a word of the same token twice; single tokens stay allowed."""
    first, second = sets.bad
    return ((sets.free[1], first), (second, second))


OPTIONS = (
    _fixed("temperature", 1.0, 0.0, 1.4),
    _fixed("top_k", 0, 3, 40),
    _fixed("top_p", 1.0, 0.6, 0.95),
    _fixed("min_p", 0.0, 0.02, 0.3),
    _fixed("top_n_sigma", 0.0, 1.0, 0.4),
    Option("seed", (lambda _: None, lambda sets: sets.seed)),
    _fixed("presence_penalty", 0.0, 1.5, -0.8),
    _fixed("frequency_penalty", 0.0, 0.7, -0.4),
    _fixed("repetition_penalty", 1.0, 1.3, 0.8),
    Option(
        "logit_bias",
        (
            lambda _: {},
            # Towards stop tokens and bad words, and away from some free tokens.
            lambda of: (
                dict.fromkeys((*of.stops, *of.bad, *of.ends), 4.0)
                | {of.free[0]: -3.0, of.free[1]: 2.5}
            ),
            lambda of: {of.free[0]: -100.0, of.stops[0]: -100.0, of.free[2]: 7.0},
        ),
    ),
    Option("allowed_token_ids", (lambda _: None, _few, _half)),
    Option(BAD_WORD_FIELD, (lambda _: (), lambda sets: ((sets.bad[0],),), _bad_pair)),
    _fixed("min_tokens", 0, 4),
    Option("stop_token_ids", (lambda _: (), lambda sets: sets.stops)),
    _fixed("ignore_eos", False, True),
    _fixed("n", 1, 2, 3),
    _fixed("logprobs", None, 0, 5),
    _fixed("prompt_logprobs", None, 0, 3),
    Option(FORM_FIELD, (lambda _: None, lambda sets: sets.text_form, lambda sets: sets.json_form)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionCoverage:
    """How much of the matrix was run; `missing` names the pairs that occur in no request."""

    num_combinations: int
    num_pairs: int
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionMatrix:
    """A row for each request of a workload; one level index per option."""

    options: tuple[Option, ...] = OPTIONS
    rows: tuple[Row, ...]

    @property
    def num_levels(self) -> tuple[int, ...]:
        return tuple(len(option.levels) for option in self.options)

    def without(self, name: str) -> "OptionMatrix":
        kept = [i for i, option in enumerate(self.options) if option.name != name]
        return OptionMatrix(
            options=tuple(self.options[i] for i in kept),
            rows=tuple(tuple(row[i] for i in kept) for row in self.rows),
        )

    def coverage(self) -> OptionCoverage:
        missing = missing_pairs(self.num_levels, self.rows)
        return OptionCoverage(
            num_combinations=len(set(self.rows)),
            num_pairs=len(all_pairs(self.num_levels)) - len(missing),
            missing=tuple(
                f"{self.options[left].name}[{one}] with {self.options[right].name}[{other}]"
                for left, one, right, other in missing
            ),
        )

    def apply(
        self, arrivals: Sequence[Arrival], vocabulary: MatrixVocabulary
    ) -> tuple[Arrival, ...]:
        pairs = enumerate(zip(arrivals, self.rows, strict=True))
        return tuple(self._combine(each, row, at, vocabulary) for at, (each, row) in pairs)

    def _combine(
        self, arrival: Arrival, row: Row, index: int, vocabulary: MatrixVocabulary
    ) -> Arrival:
        sets, asked = _token_sets(index, vocabulary), arrival.request.params
        values: dict[str, Any] = {
            option.name: option.levels[level](sets)
            for option, level in zip(self.options, row, strict=True)
        }
        bad_words, form = values.pop(BAD_WORD_FIELD, ()), values.pop(FORM_FIELD, None)
        if form is not None and values["min_tokens"] and form.json_object:
            form = JSON_FORMS[0]  # an object may have fewer tokens
        if form is not None and values["allowed_token_ids"] is not None:
            allowed = {*values["allowed_token_ids"], *vocabulary.going_on}
            values["allowed_token_ids"] = tuple(sorted(allowed))
        max_tokens = max(asked.max_tokens or 0, values["min_tokens"])
        params = replace(asked, **values, max_tokens=max_tokens, structured=form)
        constraint = None if form is None else spec_of(form)
        return arrival.asking(params=params, bad_word_token_ids=bad_words, constraint=constraint)


def make_matrix(options: tuple[Option, ...] = OPTIONS) -> OptionMatrix:
    num_levels = tuple(len(option.levels) for option in options)
    return OptionMatrix(options=options, rows=covering_rows(num_levels, times=TIMES))


def _token_sets(index: int, vocabulary: MatrixVocabulary) -> TokenSets:
    """Different sets for each request, so that rows of a batch have different lists."""
    rng = random.Random(index)  # noqa: S311  a workload, not a secret
    taken = {*vocabulary.eos_token_ids, *vocabulary.going_on, *vocabulary.words}
    tokens = rng.sample(sorted(set(range(vocabulary.size)) - taken), 10)
    bad = rng.sample(vocabulary.words, 2) if vocabulary.words else tokens[8:]
    return TokenSets(
        free=tuple(tokens[:6]),
        stops=tuple(tokens[6:8]),
        bad=tuple(bad),
        ends=vocabulary.eos_token_ids,
        vocab_size=vocabulary.size,
        seed=rng.randrange(1 << 40),
        text_form=TEXT_FORMS[index % len(TEXT_FORMS)],
        json_form=JSON_FORMS[index % len(JSON_FORMS)],
    )
