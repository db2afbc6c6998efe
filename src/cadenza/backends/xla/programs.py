"""The compiled programs of one runner: a step per bucket, and the updates of the device state; and
JAX's cache of them on disk, of which a disk that is full, or fails, ends no compilation.
`compile_programs` compiles everything ahead of time: a compiled program raises for another shape,
so nothing can compile after warm-up."""

import itertools
import logging
import os
import re
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.decoder import DecoderWeights
from cadenza.backends.xla.device import DevicePlacement
from cadenza.backends.xla.device_state import (
    ITEMS_PER_CALL,
    MASK_ROWS,
    PAGE_COPIES,
    PAGE_UPDATES,
    PARTS_OF_STATE,
    CopyPrograms,
    PutArrays,
    RowState,
    TakeArrays,
    copy_function,
    copy_rules,
    new_states,
    page_arrays,
    read_function,
    scores_of_row,
    slot_arrays,
    state_function,
    with_page_arrays,
    with_slot_arrays,
    write_function,
    write_masks,
    write_page_table,
    write_rules,
)
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.backends.xla.step_program import StepProgram, can_split_steps
from cadenza.batch.step_schema import StepLayout
from cadenza.batch.token_rules import MASK

Compiled = Callable[..., Any]


_Options = dict[str, str | bool]  # compiler options of XLA

# By platform. The concurrency-optimised schedule runs operations on XLA's own threads beside the
# kernels, which use every core: a step of one row takes 10 % longer.
STEP_OPTIONS: dict[str, _Options] = {
    "cpu": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
}

# By platform, for programs that only pass integers on. Without XLA's optimisations they take some
# microseconds more with hundreds of rows, and are compiled sooner: in a third of the time, where
# XLA can still generate the code of fusions without MLIR.
_ROUTING_OPTIONS: dict[str, _Options] = {
    "cpu": {"xla_backend_optimization_level": "0"}
    | ({"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11, 1) else {})
}


# By platform: a GPU has many buckets, each of which takes XLA a second. On a CPU there are few, and
# XLA uses threads itself.
_COMPILING_THREADS = {"gpu": min(8, os.cpu_count() or 1)}
# JAX warns so of each program.
_FAILURE = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '.*?': (.*)", re.DOTALL
)
_ERRNO = re.compile(r"^\w*Error: \[Errno \d+\] ")
_LINES = {
    "writing": "compiled programs cannot be kept in %s (%s): everything else goes on, and the next "
    "start compiles again; make room there, or set CADENZA_CACHE_DIR to another folder",
    "reading": "a compiled program in %s cannot be read (%s) and is compiled again; remove the "
    "folder, which is filled anew, to be rid of this line",
}
JUST_S = 5.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPrograms:
    """Each changes a `RowState`."""

    write_page_table: Compiled
    write_rules: Compiled
    copy_rules: Compiled
    write_masks: Compiled


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """`step` maps a bucket (padded tokens) to its step; `begin` and `choose` to its two parts, for
    steps whose masks follow: none if XLA sees the operations, or the model reads hidden states."""

    new_state: Compiled
    rows: RowPrograms
    copy_pages: Compiled
    pages: CopyPrograms | None = None
    states: CopyPrograms | None = None
    read_scores: Compiled | None = None
    step: dict[int, Compiled] = field(default_factory=dict[int, Compiled])
    begin: dict[int, Compiled] = field(default_factory=dict[int, Compiled])
    choose: dict[int, Compiled] = field(default_factory=dict[int, Compiled])


def compile_programs(
    ops: OpTable,
    spec: DecoderSpec,
    setup: RunnerSetup,
    weights: DecoderWeights,
    placement: DevicePlacement,
) -> Programs:
    return _Compiler(ops, spec, setup, placement).compile(weights)


class _Compiler:
    def __init__(
        self, ops: OpTable, spec: DecoderSpec, setup: RunnerSetup, placement: DevicePlacement
    ) -> None:
        self._ops = ops
        self._spec = spec
        self._setup = setup
        self._placement = placement
        self._platform = placement.platform
        self._step_options = STEP_OPTIONS.get(placement.platform, {})
        self._routing_options = _ROUTING_OPTIONS.get(placement.platform, {})
        state = jax.eval_shape(state_function(ops, spec, setup))
        pools = placement.abstract_parts(state.pools)
        self._state = self._abstract(state._replace(pools=None))._replace(pools=pools)

    def compile(self, weights: DecoderWeights) -> Programs:
        wrap, copies = self._placement.wrap, (self._words(PAGE_COPIES, 3), self._words())
        copy_pages = copy_function(self._ops, self._spec.page_size)
        copy_pages = jax.jit(
            wrap(copy_pages, (PARTS_OF_STATE, False, False), PARTS_OF_STATE), donate_argnums=0
        )
        new_state = wrap(state_function(self._ops, self._spec, self._setup), (), PARTS_OF_STATE)
        programs = Programs(
            new_state=self._placement.jit_new(new_state).lower().compile(),
            rows=self._row_programs(),
            copy_pages=copy_pages.lower(self._state, *copies).compile(),
        )
        if "scores" in self._setup.capabilities:
            reading = jax.jit(scores_of_row).lower(self._state.pools.scores, self._words())
            programs = replace(programs, read_scores=reading.compile())
        if "page_copies" in self._setup.capabilities:
            programs = replace(programs, **self._all_copy_programs())
        with ThreadPoolExecutor(_COMPILING_THREADS.get(self._platform, 1)) as compiling:
            added = [
                self._start_step(compiling, bucket, _as_abstract(weights))
                for bucket in self._ops.token_buckets(self._setup.limits.max_num_batched_tokens)
            ]
        for bucket, name, compiled in itertools.chain(*added):
            getattr(programs, name)[bucket] = compiled.result()
        return programs

    def _start_step(
        self, compiling: Executor, bucket: int, weights: DecoderWeights
    ) -> list[tuple[int, str, "Future[Compiled]"]]:
        # Traced one after another, since an op table records one program at a time.
        spec, setup = self._spec, self._setup
        layout = StepLayout(bucket, setup.limits.max_num_seqs)
        program = StepProgram(
            ops=self._ops,
            spec=spec,
            layout=layout,
            keeps_hidden="hidden_states" in setup.capabilities,
        )
        whole = weights, self._state, self._words(layout.num_words)
        kept: list[Any] = []
        if spec.model.reads_hidden:
            num_slots, width = setup.limits.num_pages * spec.page_size, spec.model.hidden_size
            states = jax.eval_shape(lambda: new_states(num_slots, width, spec.dtype))
            kept.append(self._abstract(states))
        marks = (True, PARTS_OF_STATE, False, *(False for _ in kept))
        whole_step = self._placement.wrap(program.step, marks, (PARTS_OF_STATE, False, False))
        step, _ = self._part(compiling, whole_step, *whole, *kept)
        if not can_split_steps(self._ops, spec.model):
            return [(bucket, "step", step)]
        begin, (_, hidden) = self._part(compiling, program.begin, *whole)
        rest = weights.lm_head, self._state.rows, whole[2], hidden
        choose, _ = self._part(compiling, program.choose, *rest)
        return [(bucket, "step", step), (bucket, "begin", begin), (bucket, "choose", choose)]

    def _part(self, compiling: Executor, function: Callable[..., Any], *inputs: Any) -> Any:
        has_states = "hidden_states" in self._setup.capabilities or self._spec.model.reads_hidden
        options = self._step_options
        if self._ops.is_opaque and not has_states:
            options = options | self._routing_options
        lowered = jax.jit(function, donate_argnums=1).lower(*inputs)
        return compiling.submit(lowered.compile, options), self._abstract(lowered.out_info)

    def _row_programs(self) -> RowPrograms:
        rows = self._state.rows
        num_words = rows.rule_records.shape[1]

        def lower(function: Callable[..., RowState], *shapes: tuple[int, ...]) -> Any:
            inputs = (self._words(*each) for each in shapes)
            return jax.jit(function, donate_argnums=0).lower(rows, *inputs)

        options = self._routing_options or None
        return RowPrograms(
            write_page_table=lower(write_page_table, (PAGE_UPDATES, 3)).compile(options),
            write_rules=lower(write_rules, (), (num_words,)).compile(options),
            copy_rules=lower(copy_rules, (MASK_ROWS, 2)).compile(options),
            write_masks=lower(write_masks, (MASK_ROWS,), (MASK_ROWS, num_words - MASK)).compile(),
        )

    def _all_copy_programs(self) -> dict[str, CopyPrograms]:
        limits = self._setup.limits
        found = {"pages": self._copy_programs(page_arrays, with_page_arrays, limits.num_pages)}
        if self._spec.model.recurrence is not None:
            parts = slot_arrays, with_slot_arrays, limits.num_state_slots
            found["states"] = self._copy_programs(*parts)
        return found

    def _copy_programs(self, take: TakeArrays, put: PutArrays, num_items: int) -> CopyPrograms:
        items = self._words(ITEMS_PER_CALL)
        reading = jax.jit(read_function(take, num_items)).lower(self._state, items)
        parts = self._abstract(reading.out_info)
        writing = jax.jit(write_function(take, put, num_items), donate_argnums=0)
        writing = writing.lower(self._state, items, parts, self._words())
        return CopyPrograms(read=reading.compile(), write=writing.compile(), parts=parts)

    def _words(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._placement.abstract(jax.ShapeDtypeStruct(shape, jnp.int32))

    def _abstract(self, tree: Any) -> Any:
        return self._placement.abstract(tree)


def _as_abstract(weights: DecoderWeights) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), weights
    )


def enable_compilation_cache(folder: Path) -> None:
    """Caches compiled programs on disk (JAX keys them by program, versions, flags and CPU), unless
    JAX_COMPILATION_CACHE_DIR is set. If the folder cannot be created, logs a warning."""
    chosen = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not chosen:
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            logger.warning("no compilation cache: the folder cannot be made (%s)", error.strerror)
            return
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _log_once(chosen or str(folder))


def _log_once(folder: str) -> None:
    warnings.filterwarnings("always", _FAILURE.pattern)
    shown = warnings.showwarning
    if not isinstance(shown, _Failures):
        warnings.showwarning = _Failures(others=shown, folder=folder)
    elif shown.folder != folder:
        shown.folder = folder
        shown.reported.clear()


@dataclass(slots=True, kw_only=True)
class _Failures:
    others: Callable[..., None]
    folder: str
    reported: set[str] = field(default_factory=set[str])

    def __call__(self, message: Warning | str, *where: Any, **more: Any) -> None:
        found = _FAILURE.match(str(message))
        if found is None:
            self.others(message, *where, **more)
            return
        kind, cause = found[1], _ERRNO.sub("", " ".join(found[2].split()))
        if kind == "writing":
            _remove_partial(Path(self.folder))
        if kind not in self.reported:
            self.reported.add(kind)
            logger.warning(_LINES[kind], self.folder, cause)


def _remove_partial(folder: Path) -> None:
    # JAX would read a partly written file, and never write it again.
    with suppress(OSError):
        age_s, path = min((time.time() - each.stat().st_mtime, each) for each in folder.iterdir())
        if age_s < JUST_S:
            path.unlink()
