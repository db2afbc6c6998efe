"""`MlxRunner`: `backends.base.Runner` on MLX, in a thread of its own, since MLX's streams belong to
threads. Invariants: a page is a slot, of one sequence; steps run in launch order; a step is started
before the previous one has been computed; nothing runs after `close`. Legend as in
`batch.step_schema`; B slots · S capacity of a slot."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from cadenza.backends.base import Capability, RunnerSetup
from cadenza.backends.mlx.arrays import mlx_arrays, to_device
from cadenza.backends.mlx.device import MlxDevice, find_mlx_device, limit_memory
from cadenza.backends.mlx.probe import find_abilities
from cadenza.backends.mlx.slot_model import CHUNK, Abilities, DecodedToken, SlotModel, StepSplit
from cadenza.backends.mlx.slots import SlotSizes
from cadenza.backends.mlx.zoo import load_zoo_model, set_dtype
from cadenza.backends.runner_thread import RunnerThread
from cadenza.backends.token_choice import (
    COLUMN_TOKEN,
    NUM_COLUMNS,
    TokenChoice,
    TokenRules,
    read_result,
)
from cadenza.batch.step_schema import (
    LAST_SAMPLED,
    NO_HIDDEN,
    NO_RULES,
    NO_TARGET,
    NUM_EXTRA_LOGIT_ROWS,
    LogitInputs,
    ModelInputs,
    StepOutput,
)
from cadenza.batch.token_rules import BAD_WORDS, MASK, NONE, RuleLayout
from cadenza.config import PAGE_SIZE_UNIT
from cadenza.errors import RunnerError
from cadenza.request import MAX_BAD_WORD_TOKENS

Int32Array = npt.NDArray[np.int32]

CPU_CHUNK_SIZES = (16, CHUNK)  # MLX's CPU kernels give a token the same bits in calls of every size
GPU_CHUNK_SIZES = (CHUNK,)  # Metal's kernels are chosen by the size of a call, so there is one size


@dataclass(frozen=True, slots=True)
class MlxStepHandle:
    """A launched step, whose computation the runner's thread has started."""

    started: "Future[mx.array | None]"  # [L, C], if the step has logit rows
    num_logits: int
    run: Callable[[Callable[[], Int32Array]], "Future[Int32Array]"]

    def result(self) -> StepOutput:
        chosen, rows = self.started.result(), np.zeros((0, NUM_COLUMNS), np.int32)
        if chosen is not None:
            rows = self.run(lambda: np.array(chosen)[: self.num_logits]).result()
        return read_result(rows, NO_HIDDEN)


class MlxRunner:
    """A model in dense slots, of which there is one for each page of the limits."""

    def __init__(self, folder: Path, vocab_size: int, setup: RunnerSetup) -> None:
        limits = setup.limits
        if limits.max_pages_per_seq != 1:
            raise RunnerError(
                f"the mlx backend keeps a sequence in one page, but {limits.max_model_len} tokens "
                f"need {limits.max_pages_per_seq} pages of {limits.page_size}"
            )
        self._limits = limits
        self._vocab_size = vocab_size
        self._device = device = find_mlx_device(setup.device)
        self._thread = RunnerThread(
            "mlx", lambda: _Steps(folder, vocab_size, device, setup), _thread_state()
        )

    @property
    def name(self) -> str:
        return f"mlx:{self._device.name} (mlx-lm ops)"

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({"logprobs"})

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def hidden_size(self) -> None:
        return None

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return (self._limits.max_num_batched_tokens,)

    @property
    def abilities(self) -> Abilities:
        return self._thread.held.abilities

    def warmup(self) -> None:
        self._thread.run(self._thread.held.warm_up).result()

    def launch(self, inputs: ModelInputs) -> MlxStepHandle:
        steps, run = self._thread.held, self._thread.run
        return MlxStepHandle(run(lambda: steps.start(inputs)), inputs.num_logits, run)

    def reset(self) -> None:
        self._thread.run(self._thread.held.reset).result()

    def close(self) -> None:
        self._thread.close()


def _thread_state() -> Callable[[], None]:
    """Makes a thread release what MLX keeps for it when it ends, closed or not."""
    own = threading.local()

    def begin() -> None:
        own.state = _ThreadState()

    return begin


class _ThreadState:
    """A value of a thread, dropped when the thread ends and can still run Python. Functions that
    MLX compiled are otherwise released later, which needs the GIL: an exiting interpreter
    aborts."""

    def __del__(self) -> None:
        mx.synchronize()
        mx.clear_streams()


class _Steps:
    def __init__(
        self, folder: Path, vocab_size: int, device: MlxDevice, setup: RunnerSetup
    ) -> None:
        limits = setup.limits
        self._num_rows = limits.max_num_seqs
        self._sizes = SlotSizes(
            num_slots=limits.num_pages,
            capacity=limits.page_size + PAGE_SIZE_UNIT,
            fill=setup.fill or 0.0,
        )
        mx.set_default_device(device.device)
        limit_memory(device)
        is_cpu = device.name == "cpu"
        loaded = load_zoo_model(folder)
        set_dtype(loaded, setup.dtype)
        self._caches = loaded.new_caches
        chunk_sizes = CPU_CHUNK_SIZES if is_cpu else GPU_CHUNK_SIZES
        self._model = SlotModel(loaded.model, loaded.new_caches(), self._sizes, chunk_sizes)
        mx.eval(loaded.model.parameters())
        self._loaded = loaded
        self._num_words = RuleLayout(vocab_size).num_words
        self._has_state = False
        self._allocate()

    @property
    def abilities(self) -> Abilities:
        return self._model.abilities

    def warm_up(self) -> None:
        self._model.abilities = find_abilities(self._loaded)
        tokens = mx.zeros(self._sizes.num_slots, mx.int32)
        self._model.extend(0, 0, mx.zeros(1, mx.int32))
        positions = np.ones(self._sizes.num_slots, np.int32)
        logits = self._model.decode(tokens, positions, [0])
        mx.eval(logits, *self._model.arrays())
        self.reset()

    def start(self, inputs: ModelInputs) -> mx.array | None:
        if not self._has_state:
            raise RunnerError("the step before this one failed; call reset() first")
        self._has_state = False
        choices = self._compute(inputs)
        mx.async_eval(*self._arrays(), *([] if choices is None else [choices]))
        self._has_state = True
        return choices

    def reset(self) -> None:
        mx.synchronize()
        self._has_state = False
        self._model.drop_slots()
        mx.clear_cache()
        self._allocate()

    def close(self) -> None:
        mx.synchronize()
        self._model.drop_slots()
        del self._model, self._loaded, self._last_sampled, self._history
        mx.clear_cache()

    def _allocate(self) -> None:
        self._slot_of_row = np.zeros(self._num_rows, np.intp)
        num_records = self._num_rows + NUM_EXTRA_LOGIT_ROWS
        self._records = np.zeros((num_records, self._num_words), np.int32)
        self._last_sampled = mx.zeros(self._num_rows, mx.int32)
        shape = (self._sizes.num_slots, self._sizes.capacity)
        self._history = mx.full(shape, NONE, mx.int32)
        self._has_state = True

    def _arrays(self) -> list[mx.array]:
        return [self._last_sampled, self._history, *self._model.arrays()]

    def _compute(self, inputs: ModelInputs) -> mx.array | None:
        for row, index, page in inputs.page_updates:
            assert index == 0
            self._slot_of_row[row] = page
        for update in inputs.rule_updates:
            self._records[update.row] = update.record
        for update in inputs.mask_updates:
            self._records[update.record] = self._records[update.row]
            self._records[update.record, MASK:] = update.mask
        for source, destination, num_tokens in inputs.page_copies.tolist():
            self._model.copy(source, destination, num_tokens)
            self._history[destination, :num_tokens] = self._history[source, :num_tokens]
        step = StepSplit.of(inputs, self._slot_of_row, has_cuts=self._model.depends_on_cuts)
        parts = self._compute_spans(step)
        for each in step.single:
            logits = self._decode([each])
            if each.is_wanted:
                parts.append(logits[each.slot][None])
        if step.decoding:
            parts.append(self._decode(step.decoding))
        if not inputs.num_logits:
            return None
        logits = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return self._choose(inputs, step, logits)

    def _compute_spans(self, step: StepSplit) -> list[mx.array]:
        needed: list[mx.array] = []
        for span in step.spans:
            tokens = self._known(mx.array(span.token_ids), mx.array([span.row]))
            positions = np.arange(span.start, span.start + len(span.token_ids))
            self._history[span.slot, mx.array(positions)] = tokens
            if not span.wanted:
                self._model.extend(span.slot, span.start, tokens)
                continue
            logits = self._model.compute(span.slot, span.start, tokens)
            joined = logits[0] if len(logits) == 1 else mx.concatenate(logits)
            needed.append(joined[mx.array(span.wanted)])
        return needed

    def _decode(self, decoded: list[DecodedToken]) -> mx.array:
        num_slots = self._sizes.num_slots
        ids = np.zeros(num_slots, np.int32)
        positions = np.zeros(num_slots, np.int32)
        rows = np.zeros(num_slots, np.int32)
        for each in decoded:
            ids[each.slot], positions[each.slot], rows[each.slot] = (
                each.token_id,
                each.position,
                each.row,
            )
        active = [each.slot for each in decoded]
        tokens = self._known(mx.array(ids), mx.array(rows))
        slots = mx.array(np.array(active, np.int32))
        self._history[slots, mx.array(positions[active])] = tokens[slots]
        ending = [each.slot for each in decoded if each.ends_prompt]
        return self._model.decode(tokens, positions, active, ending)

    def _known(self, ids: mx.array, rows: mx.array) -> mx.array:
        return mx.where(ids == LAST_SAMPLED, self._last_sampled[rows], ids)

    def _choose(self, inputs: ModelInputs, step: StepSplit, logits: mx.array) -> mx.array:
        count = inputs.num_logits
        size = self._num_rows if count <= self._num_rows else len(inputs.logits.rows)
        rows = _first_rows(inputs.logits, count, size)
        sources = np.zeros(size, np.int32)
        sources[:count] = step.sources
        logits = logits[mx.array(sources)].astype(mx.float32)
        choices = TokenChoice(mlx_arrays()).choose_tokens(logits, rows, self._ruled(logits, rows))
        is_choice = rows.targets[:count] == NO_TARGET
        newest = np.full(self._num_rows, -1, np.int32)
        newest[rows.rows[:count][is_choice]] = np.flatnonzero(is_choice)
        chosen = choices[mx.array(np.maximum(newest, 0)), COLUMN_TOKEN]
        self._last_sampled = mx.where(to_device(newest >= 0), chosen, self._last_sampled)
        return choices

    def _ruled(self, logits: mx.array, rows: LogitInputs[Any]) -> mx.array | None:
        has_rules = rows.rule_record != NO_RULES
        if not has_rules.any():
            return None
        records = np.where(has_rules[:, None], self._records[rows.rule_record], NONE)
        slots = mx.array(self._slot_of_row[rows.rows].astype(np.int32))
        is_inside = np.arange(self._sizes.capacity) < rows.positions[:, None]
        context = mx.where(to_device(is_inside), self._history[slots], NONE)
        rules = TokenRules(mlx_arrays(_longest_bad_word(records)))
        lengths = to_device(rows.positions)
        ruled = rules.apply(logits, to_device(records), context, lengths)
        return mx.where(to_device(has_rules)[:, None], ruled, logits)


def _first_rows(logits: LogitInputs[Any], count: int, size: int) -> LogitInputs[Any]:
    cut = {each.name: getattr(logits, each.name)[:size].copy() for each in fields(logits)}
    rows = replace(logits, **cut)
    for values, off in (
        (rows.rows, 0),
        (rows.positions, 0),
        (rows.targets, NO_TARGET),
        (rows.temperature, 0),
        (rows.num_logprobs, -1),
        (rows.rule_record, NO_RULES),
    ):
        values[count:] = off
    return rows


def _longest_bad_word(records: Int32Array) -> int:
    listed = records[:, BAD_WORDS : BAD_WORDS + MAX_BAD_WORD_TOKENS]
    ends = np.flatnonzero(np.pad(listed < 0, ((0, 0), (0, 1)), constant_values=True))
    return int(np.diff(ends, prepend=-1).max()) - 1
