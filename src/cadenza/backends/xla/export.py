"""`export_programs`: the step as StableHLO, for compilers other than XLA. A program is a module
with one public function. Weights are parameters, which a runtime looks up by name; the state comes
first among the results, each part in place of the argument that it was. Rules and page tables are
arguments that a step only reads."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.base import RunnerSetup
from cadenza.backends.xla.decoder import load_decoder
from cadenza.backends.xla.device_state import DeviceState, RowState, state_function
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.reference import MAX_TOKENS, OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, LayerPools
from cadenza.backends.xla.step_program import StepProgram
from cadenza.batch.step_schema import NUM_EXTRA_LOGIT_ROWS, StepLayout
from cadenza.batch.token_rules import RuleLayout
from cadenza.models.model_config import ModelConfig
from cadenza.weights.weights import Weights

SCOPE = "model"  # of the parameters' names
_TYPES = {"float32": "f32", "bfloat16": "bf16", "int32": "i32"}

_MAIN = "func.func public @main("  # how the function begins that JAX exports


_LOCATION = re.compile(r' loc\((#loc\d*|"[^"]*"(\(#loc\d*\))?)\)|^#loc.*\n', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedProgram:
    """A program's module, of which `name` is the public function."""

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """The programs of a runner. `weights` are the parameters by name; `state` is what every program
    takes after its own arguments, and returns before its own results: the pools, then the last
    sampled tokens [R], then the token history [slots]."""

    weights: dict[str, npt.NDArray[Any]]
    state: tuple[jax.ShapeDtypeStruct, ...]
    programs: tuple[ExportedProgram, ...]


def export_programs(model: ModelConfig, weights: Weights, setup: RunnerSetup) -> ExportedModel:
    """The programs `decode` (a token and a result a row), `prompt` (`MAX_TOKENS` tokens), both
    (wire [·], page table [R, P], rule records [L, W], state…) to (state…, result [L, C]), and
    `copy` of a page, (source and destination [2], state…) to the state."""
    return _Export(model, weights, setup).run()


class _Export:
    def __init__(self, model: ModelConfig, weights: Weights, setup: RunnerSetup) -> None:
        self._limits = limits = setup.limits
        dtype = jnp.dtype(setup.dtype).type
        self._spec = DecoderSpec(model=model, dtype=dtype, page_size=limits.page_size)
        self._ops = OpTable(self._spec)
        source = WeightSource(self._ops, self._spec, weights)
        loaded = load_decoder(source, limits.max_model_len)
        self._leaves, self._tree = jax.tree.flatten(loaded)
        state: DeviceState = jax.eval_shape(state_function(self._ops, self._spec, setup))
        self._state, self._state_tree = jax.tree.flatten(_kept(state))

    def run(self) -> ExportedModel:
        num_rows = self._limits.max_num_seqs
        programs = (
            self._step("decode", num_rows, num_rows),
            self._step("prompt", MAX_TOKENS, None),
            self._copy(),
        )
        weights = {f"w{index}": np.asarray(leaf) for index, leaf in enumerate(self._leaves)}
        return ExportedModel(weights=weights, state=tuple(self._state), programs=programs)

    def _step(self, name: str, num_tokens: int, num_logits: int | None) -> ExportedProgram:
        limits, count = self._limits, len(self._state)
        layout = StepLayout(num_tokens, limits.max_num_seqs)
        program = StepProgram(ops=self._ops, spec=self._spec, layout=layout, num_logits=num_logits)

        def step(wire: Any, table: Any, records: Any, *leaves: Any) -> list[Any]:
            kept = jax.tree.unflatten(self._state_tree, leaves[:count])
            weights = jax.tree.unflatten(self._tree, leaves[count:])
            state, result, _ = program.step(weights, _state_of(kept, table, records), wire)
            return [*jax.tree.leaves(_kept(state)), result]

        num_words = RuleLayout(self._spec.model.vocab_size).num_words
        num_records = limits.max_num_seqs + NUM_EXTRA_LOGIT_ROWS
        own = [
            _words(layout.num_words),
            _words(limits.max_num_seqs, limits.max_pages_per_seq),
            _words(num_records, num_words),
        ]
        return _export(name, step, own, self._state, self._leaves)

    def _copy(self) -> ExportedProgram:
        size = self._limits.page_size

        def copy(pages: Any, *leaves: Any) -> list[Any]:
            pools, last_sampled, history = jax.tree.unflatten(self._state_tree, leaves)
            slots = jnp.arange(size)

            def copy_slots(side: jax.Array) -> jax.Array:
                # IREE compiles no dynamic_update_slice of an argument for Vulkan.
                page = side[pages[0] * size + slots]
                return side.at[pages[1] * size + slots].set(page, unique_indices=True)

            kv, history = jax.tree.map(copy_slots, (pools.kv, history))
            return jax.tree.leaves((pools._replace(kv=kv), last_sampled, history))

        return _export("copy", copy, [_words(2)], self._state, [])


_Kept = tuple[LayerPools, Any, Any]  # pools, last sampled tokens, token history


def _kept(state: DeviceState) -> _Kept:
    return state.pools, state.rows.last_sampled, state.rows.token_history


def _state_of(kept: _Kept, table: jax.Array, records: jax.Array) -> DeviceState:
    pools, last_sampled, history = kept
    return DeviceState(pools, RowState(last_sampled, table, records, history))


def _words(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _export(
    name: str,
    function: Callable[..., list[Any]],
    own: Sequence[Any],
    state: Sequence[Any],
    weights: Sequence[Any],
) -> ExportedProgram:
    inputs = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (*own, *state, *weights)]
    exported = jax.export.export(jax.jit(function, keep_unused=True), platforms=["cpu"])(*inputs)
    text = exported.mlir_module()
    assert text.count(_MAIN) == 1, "JAX names the exported function"
    text = _LOCATION.sub("", text.replace(_MAIN, "func.func private @main("))
    body, _, _ = text.rpartition("}")
    taken = len(own) + len(state)
    results = ", ".join(_type(each) for each in exported.out_avals)
    types = [_type(each) for each in inputs]
    arguments = [f"%a{index}: {kind}" for index, kind in enumerate(types[:taken])]
    for index in range(len(state)):
        arguments[len(own) + index] += f" {{iree.abi.output = {index} : index}}"
    names = [f"w{index}" for index in range(len(weights))]
    held = dict(zip(names, types[taken:], strict=True))
    values = ", ".join(f"%a{index}" for index in range(taken)) + "".join(f", %{n}" for n in names)
    count = len(exported.out_avals)
    lines = [
        *(
            f'util.global private @{each} = #flow.parameter.named<"{SCOPE}"::"{each}"> : {kind}'
            for each, kind in held.items()
        ),
        f"func.func public @{name}({', '.join(arguments)}) -> ({results}) {{",
        *(f"  %{each} = util.global.load @{each} : {kind}" for each, kind in held.items()),
        f"  %made:{count} = func.call @main({values}) : ({', '.join(types)}) -> ({results})",
        f"  return {', '.join(f'%made#{index}' for index in range(count))} : {results}",
        "}",
    ]
    return ExportedProgram(name=name, text=body + "\n".join(lines) + "\n}\n")


def _type(each: Any) -> str:
    sizes = "".join(f"{size}x" for size in each.shape)
    return f"tensor<{sizes}{_TYPES[np.dtype(each.dtype).name]}>"
