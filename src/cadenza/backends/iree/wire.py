"""`WireMap`: a step's inputs as the words of a module that was compiled for its own sizes and for
the step schema of then. Fields are copied by name: one that a module does not know has no effect,
or the step is refused."""

from typing import Any

import numpy as np

from cadenza.backends.iree.manifest import CompiledProgram, Manifest, WireField
from cadenza.batch.step_schema import (
    LAST_SAMPLED,
    NO_RULES,
    NO_TARGET,
    PADDING,
    Int32Array,
    ModelInputs,
    StepGroups,
    StepLayout,
    specs_of,
)
from cadenza.errors import RunnerError

GROUPS = ("counts", "tokens", "rows", "logits")
STARTS = "rows.query_starts"


class WireMap:
    """Copies steps of `page_size` tokens a page into words for a program of `num_rows` rows."""

    def __init__(
        self, program: CompiledProgram, num_rows: int, page_size: int, manifest: Manifest
    ) -> None:
        self._layout = StepLayout(program.num_tokens, num_rows)
        self._program = program
        self._page_size = page_size
        self._slot_size = manifest.max_model_len
        self._vocab_size = manifest.vocab_size
        self._known = {each.name for each in program.fields}

    def words(self, inputs: ModelInputs) -> Int32Array:
        """Raises RunnerError if the step has what the program was not compiled for."""
        own = self._layout.empty_words()
        views = self._layout.views(own)
        self._copy(inputs.groups, views)
        slots = views.tokens.slots
        moved = slots // self._page_size * self._slot_size + slots % self._page_size
        slots[:] = np.where(slots < 0, slots, moved)
        self._check(views)
        packed = np.zeros(max(each.stop for each in self._program.fields), np.int32)
        for field in self._program.fields:
            packed[field.start : field.stop] = self._words_of(field, views)
        return packed

    def _check(self, views: StepGroups[Any]) -> None:
        # The device would not bound an index.
        num_rows = self._layout.num_rows
        num_slots = num_rows * self._slot_size
        for name, values, least, end in (
            ("token id", views.tokens.ids, LAST_SAMPLED, self._vocab_size),
            ("position", views.tokens.positions, 0, self._slot_size),
            ("slot", views.tokens.slots, PADDING, num_slots),
            ("first token of a row", views.rows.query_starts, 0, self._layout.num_tokens + 1),
            ("token of a logit row", views.logits.token_indices, PADDING, self._layout.num_tokens),
            ("row of a logit row", views.logits.rows, 0, num_rows),
            ("position of a logit row", views.logits.positions, 0, self._slot_size + 1),
            ("record of rules", views.logits.rule_record, NO_RULES, self._layout.num_logits),
            ("target", views.logits.targets, NO_TARGET, self._vocab_size),
        ):
            if values.min() < least or values.max() >= end:
                raise RunnerError(
                    f"a {name} of a step is outside [{least}, {end}): {values.min()} to "
                    f"{values.max()}"
                )

    def _copy(self, source: StepGroups[Any], target: StepGroups[Any]) -> None:
        for group in GROUPS:
            ours, theirs = getattr(target, group), getattr(source, group)
            for spec in specs_of(type(ours)):
                given, taken = getattr(theirs, spec.name), getattr(ours, spec.name)
                count = min(len(given), len(taken))
                taken[:count] = given[:count]
                if f"{group}.{spec.name}" == STARTS:
                    taken[count:] = given[-1]
                if f"{group}.{spec.name}" not in self._known and (taken != spec.fill).any():
                    raise RunnerError(
                        f"the compiled modules do not know {group}.{spec.name} of a step, which "
                        f"this one has; export the model again"
                    )

    def _words_of(self, field: WireField, views: StepGroups[Any]) -> Int32Array:
        group, _, name = field.name.partition(".")
        found = getattr(getattr(views, group), name, None)
        if found is None:
            raise RunnerError(f"a step has no {field.name} any more; export the model again")
        return np.ascontiguousarray(found.T).reshape(-1).view(np.int32)


def fields_of(layout: StepLayout) -> tuple[WireField, ...]:
    marks = layout.views(np.arange(layout.num_words, dtype=np.int32))
    found: list[WireField] = []
    for group in GROUPS:
        values = getattr(marks, group)
        for spec in specs_of(type(values)):
            words = getattr(values, spec.name).view(np.int32).reshape(-1)
            start = int(words.min())
            found.append(
                WireField(name=f"{group}.{spec.name}", start=start, stop=start + words.size)
            )
    return tuple(found)
