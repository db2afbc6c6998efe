"""Structured outputs that the verifier plays, and faults of their masks that it must catch.
Invariants: a request that allows `Forms.going_on` always has a token that may follow; no form is
complete before four tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cadenza.structured import (
    CompileConstraint,
    Constraint,
    ConstraintSpec,
    PendingConstraint,
    StructuredOutput,
)
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
            replace(each, request=replace(each.request, constraint=spec_of(forms[i // 2 % 6])))
            if i % 2
            else each
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


@dataclass(slots=True, eq=False)
class _Shared:
    mask: bytes | None = None
    owner: object = None


@dataclass(slots=True, eq=False)
class _Faulty:
    inner: Constraint

    @property
    def is_complete(self) -> bool:
        return self.inner.is_complete

    @property
    def has_failed(self) -> bool:
        return self.inner.has_failed

    def accept(self, token_id: int) -> None:
        self.inner.accept(token_id)

    def allowed(self) -> bytes:
        return self.inner.allowed()

    def forced(self) -> Sequence[int]:
        return ()  # every token is sampled, under the mask with the fault

    def fork(self) -> Constraint | None:
        inner = self.inner.fork()
        return None if inner is None else replace(self, inner=inner)


@dataclass(slots=True, eq=False)
class _OneStepOld(_Faulty):
    last: bytes | None = None

    def allowed(self) -> bytes:
        mask = self.inner.allowed()
        found, self.last = self.last or mask, mask
        return found


@dataclass(slots=True, eq=False)
class _OfAnotherRow(_Faulty):
    shared: _Shared = field(default_factory=_Shared)

    def allowed(self) -> bytes:
        mask, shared = self.inner.allowed(), self.shared
        is_other = shared.owner is not self and shared.mask is not None
        found = shared.mask if is_other else mask
        shared.mask, shared.owner = mask, self
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class _Pending:
    inner: PendingConstraint
    spoil: Callable[[Constraint], Constraint]

    def done(self) -> bool:
        return self.inner.done()

    def cancel(self) -> bool:
        return self.inner.cancel()

    def result(self, timeout: float | None = None) -> Constraint | None:
        found = self.inner.result(timeout)
        return None if found is None else self.spoil(found)


def _old_masks(compile: CompileConstraint) -> CompileConstraint:
    return lambda spec: _Pending(compile(spec), _OneStepOld)


def _masks_of_others(compile: CompileConstraint) -> CompileConstraint:
    shared = _Shared()
    return lambda spec: _Pending(compile(spec), lambda inner: _OfAnotherRow(inner, shared))


# Faults by name: each makes the compiler of one engine faulty.
MASK_FAULTS: Mapping[str, Callable[[CompileConstraint], CompileConstraint]] = {
    "a constraint's mask is one step old": _old_masks,
    "a row has the mask of another constraint": _masks_of_others,
}
