"""The proof at load: each operation has the same bits in steps of every size. Computes the model's
first layers, at least one of each type, in pools of its own, over tokens that are the same in each
step, and compares some rows of every operation's result: with the kernels that this card, driver
and these shapes get. Legend as in `ops.table`; K tokens that are compared."""

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.xla.decoder import DecoderWeights, run_layers
from cadenza.backends.xla.layers.residual import StepContext
from cadenza.backends.xla.ops.native_program import Call, NativeProgram, Recorded
from cadenza.backends.xla.ops.program_ops import Product, ProgramOps
from cadenza.backends.xla.ops.table import DecoderSpec, LayerPools, StepArrays
from cadenza.batch.draw_keys import draw_keys
from cadenza.batch.step_schema import StepLayout
from cadenza.config import EngineLimits
from cadenza.errors import ConfigError
from cadenza.kernel_proof import KernelProof

# Of each row of a step of prompts: a span of attention and a part of the next.
SEQUENCE_TOKENS = 700

GROWTH = 1.35  # from one compared token to the next; the first ones follow each other
MOST_THREADS = 8

_FLOATS = (np.dtype(jnp.bfloat16), np.dtype(np.float32))
_OVER_POOLS = frozenset(
    {"rope_append_attend", "latent_attend", "gated_delta", "short_conv", "selective_scan"}
)

# Operations whose second operand is one weight, and the first activations.
_PRODUCTS = frozenset({"linear", "gated_linear", "next_token"})

_Indices = npt.NDArray[np.int32]


class Outcome(NamedTuple):
    """Compared values of a step: rows of each operation's result, and its choices of tokens."""

    taken: Sequence[npt.NDArray[Any]]  # [up to K, ·] each
    choices: npt.NDArray[np.int32]  # [up to K, C]


class ProofInputs(NamedTuple):
    """A step, and the indices of the compared tokens in it: the first `count` of `places`."""

    arrays: StepArrays
    read_hidden: Any | None  # [T, E], of a model that reads hidden states
    places: Any  # [K]
    count: Any  # []


def prove_kernels(
    ops: ProgramOps, spec: DecoderSpec, limits: EngineLimits, weights: DecoderWeights
) -> KernelProof:
    """Compares steps of all sizes, then of single tokens of several rows over the KV of prompts.
    Raises ConfigError with the first operation whose bits differ."""
    started = time.perf_counter()
    sizes = ops.token_buckets(limits.max_num_batched_tokens)
    tokens = ProofTokens(spec, limits)
    steps = ProofSteps(ops, spec, weights, tokens)
    products = ops.prove_products(steps.products(tokens.prompts(1)), tokens.rows(sizes))
    prompts = {size: tokens.prompts(size) for size in sizes}
    steps.compile(prompts)
    found = {size: steps.run(size, inputs) for size, inputs in prompts.items()}
    whole = found[sizes[-1]]
    for size in sizes[:-1]:
        steps.compare(found[size], whole, f"a step of {size} tokens")
    single = [size for size in sizes if tokens.can_be_single(size)]
    for size in single:
        of_rows = steps.run(size, tokens.single_tokens(size))
        steps.compare(of_rows, whole, f"a step of {size} rows with one token each")
    return KernelProof(
        operations=tuple(dict.fromkeys(steps.labels)),
        step_sizes=sizes,
        num_single=len(single),
        elapsed_s=time.perf_counter() - started,
        products=products,
    )


class ProofTokens:
    """The tokens of the steps: token i of a step of prompts is the same one in each of them."""

    def __init__(self, spec: DecoderSpec, limits: EngineLimits) -> None:
        self._spec, self._limits = spec, limits
        self._length = min(SEQUENCE_TOKENS, limits.max_model_len)
        self._pages_per_row = -(-self._length // spec.page_size)

    @property
    def num_pages(self) -> int:
        return -(-self._most // self._length) * self._pages_per_row

    @cached_property
    def compared(self) -> _Indices:
        found = [0]
        while (following := max(found[-1] + 1, int(found[-1] * GROWTH))) < self._most:
            found.append(following)
        return np.array(found, np.int32)

    def rows(self, sizes: Sequence[int]) -> tuple[int, ...]:
        num_logits = StepLayout(1, self._limits.max_num_seqs).num_logits
        return tuple(sorted({*sizes, *(min(size, num_logits) for size in sizes)}))

    @property
    def _most(self) -> int:
        return self._num_tokens(self._limits.max_num_batched_tokens)

    def _num_tokens(self, size: int) -> int:
        return min(size, self._length * self._limits.max_num_seqs)

    def can_be_single(self, size: int) -> bool:
        """Whether there is a step of `size` rows of one token; one needs its row's state."""
        return size <= self._limits.max_num_seqs and self._spec.model.recurrence is None

    def prompts(self, size: int) -> ProofInputs:
        indices = np.arange(self._num_tokens(size))
        places = self.compared[self.compared < len(indices)]
        return self._step(size, indices, indices // self._length, places)

    def single_tokens(self, size: int) -> ProofInputs:
        indices = self.compared[np.arange(size) % len(self.compared)]
        places = np.arange(min(size, len(self.compared)), dtype=np.int32)
        return self._step(size, indices, np.arange(size), places)

    def _step(
        self, size: int, indices: npt.NDArray[Any], rows: npt.NDArray[Any], places: _Indices
    ) -> ProofInputs:
        layout = StepLayout(size, self._limits.max_num_seqs)
        groups = layout.views(layout.empty_words())
        owners, positions = np.divmod(indices, self._length)
        num_tokens, page_size = len(indices), self._spec.page_size
        first_pages = owners * self._pages_per_row
        tokens, of_rows, logits = groups.tokens, groups.rows, groups.logits
        tokens.ids[:num_tokens] = (indices * 7919 + 13) % self._spec.model.vocab_size
        tokens.positions[:num_tokens] = positions
        tokens.slots[:num_tokens] = first_pages * page_size + positions
        of_rows.query_starts[1:] = np.searchsorted(rows, np.arange(layout.num_rows), side="right")
        np.maximum.at(of_rows.kv_lens, rows, positions + 1)
        page_table = np.zeros((layout.num_rows, self._limits.max_pages_per_seq), np.int32)
        page_table[rows, : self._pages_per_row] = first_pages[:, None] + np.arange(
            self._pages_per_row
        )
        count = len(places)
        logits.token_indices[:count] = places
        logits.rows[:count] = rows[places]
        logits.positions[:count] = positions[places] + 1
        logits.temperature[:count:2] = 1.0
        logits.keys[:count] = draw_keys(np.arange(count, dtype=np.uint64), logits.positions[:count])
        arrays: dict[str, Any] = {
            "num_tokens": np.int32(num_tokens),
            "num_logits": np.int32(count),
            "tokens": tokens,
            "token_rows": _padded(rows, size),
            "rows": of_rows,
            "logits": logits,
            "page_table": page_table,
        }
        read_hidden = None
        if self._spec.model.reads_hidden:
            shape = size, self._spec.model.hidden_size
            read_hidden = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        return ProofInputs(
            StepArrays(**arrays), read_hidden, _padded(places, len(self.compared)), np.int32(count)
        )


class ProofSteps:
    """Runs steps over pools of its own; `labels` names the operations of which it gives rows."""

    def __init__(
        self, ops: ProgramOps, spec: DecoderSpec, weights: DecoderWeights, tokens: ProofTokens
    ) -> None:
        self._ops, self._spec = ops, spec
        self._weights = weights._replace(layers=weights.layers[: num_first(spec, weights)])
        self._pools = self._new_pools(tokens.num_pages)
        self._program = jax.jit(self._compute, donate_argnums=1)
        self.labels: list[str] = []
        self._products: dict[Any, Product] = {}
        self._compiled: dict[int, Any] = {}

    def _new_pools(self, num_pages: int) -> LayerPools:
        model = self._spec.model
        kv = (self._ops.new_kv_pool(group, num_pages, np.nan) for group in model.kv_groups)
        if model.recurrence is None:
            return LayerPools(tuple(kv))
        states = self._ops.new_state_pool(1, len(model.recurrent_layers), model.recurrence)
        return LayerPools(tuple(kv), states)

    def products(self, inputs: ProofInputs) -> tuple[Product, ...]:
        self._program.trace(self._weights, self._pools, inputs)
        return tuple(self._products.values())

    def compile(self, inputs: Mapping[int, ProofInputs]) -> None:
        # Traced one after another, since an op table records one program at a time.
        lowered = [
            self._program.trace(self._weights, self._pools, each).lower()
            for each in inputs.values()
        ]
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as compiling:
            compiled = compiling.map(lambda each: each.compile(), lowered)
            self._compiled = dict(zip(inputs, compiled, strict=True))

    def run(self, size: int, inputs: ProofInputs) -> Outcome:
        program = self._compiled[size]
        taken, choices, self._pools = program(self._weights, self._pools, inputs)
        valid = slice(0, int(inputs.count))
        return Outcome([np.asarray(each)[valid] for each in taken], np.asarray(choices)[valid])

    def compare(self, found: Outcome, whole: Outcome, step: str) -> None:
        """Raises ConfigError if a step has other bits than that of the most tokens."""
        for label, some, all_rows in zip(self.labels, found.taken, whole.taken, strict=True):
            if some.tobytes() != all_rows[: len(some)].tobytes():
                raise _not_exact(label, step)
        if found.choices.tobytes() != whole.choices[: len(found.choices)].tobytes():
            raise _not_exact("next_token", step)

    def _compute(
        self, weights: DecoderWeights, pools: LayerPools, inputs: ProofInputs
    ) -> tuple[list[Any], Any, LayerPools]:
        ops, arrays = self._ops, inputs.arrays
        context = StepContext.of(ops, self._spec, arrays, weights.ropes)

        def decode(program: NativeProgram) -> tuple[list[Any], Any, LayerPools]:
            taps = _Taps(program, inputs.places, inputs.count)

            def hear(call: Call) -> None:
                if not taps.is_taking:
                    self._note_product(call, jax.tree.leaves(weights))
                    taps.hear(call)

            program.listener = hear
            made = run_layers(context, weights, pools, inputs.read_hidden)
            choices = ops.next_tokens(made.hidden, weights.lm_head, arrays)
            self.labels = taps.labels
            return taps.taken, choices, made.pools

        return ops.compute_watched(decode)

    def _note_product(self, call: Call, leaves: Sequence[Any]) -> None:
        if call.name not in _PRODUCTS:
            return
        x, weight, *_ = call.used
        assert x is not None, "a product has activations"
        assert weight is not None, "a product has a weight"
        index = [id(leaf) for leaf in leaves].index(id(weight.storage.operand))
        is_gated = call.name == "gated_linear"
        columns = call.made[0].shape[1] * (2 if is_gated else 1)
        n = self._spec.model.vocab_size if call.name == "next_token" else columns
        key = weight.shape, weight.dtype, n, x.shape[1], is_gated, x.dtype
        held = jax.tree.leaves(self._weights)[index]
        self._products.setdefault(key, Product(held, n, x.shape[1], is_gated, x.dtype))


@dataclass(slots=True, eq=False)
class _Taps:
    """Takes the compared rows of each operation's result, before another overwrites them."""

    program: NativeProgram
    places: Any  # [K]
    count: Any
    labels: list[str] = field(default_factory=list[str])
    taken: list[Any] = field(default_factory=list[Any])
    is_taking: bool = False

    def hear(self, call: Call) -> None:
        if (
            call.name == "take_rows"
        ):  # from here on the rows are those of logits, which are compared
            self.places = np.arange(len(self.places), dtype=np.int32)
        for each in call.made:
            if len(each.shape) == 2 and each.dtype in _FLOATS:
                self.taken.append(self._take(each))
                self.labels.append(_label(call, each))

    def _take(self, made: Recorded) -> Any:
        self.is_taking = True
        rows = jax.ShapeDtypeStruct((len(self.places), made.shape[1]), made.dtype)
        taken = self.program.call("take_rows", rows)(made, self.count, self.places)
        self.is_taking = False
        return taken


def num_first(spec: DecoderSpec, weights: DecoderWeights) -> int:
    kinds: dict[Any, int] = {}
    for index, (kind, layer) in enumerate(zip(spec.model.layer_kinds, weights.layers, strict=True)):
        leaves, tree = jax.tree.flatten(layer)
        shapes = tuple((each.shape, np.dtype(each.dtype)) for each in leaves)
        kinds.setdefault((kind, tree, shapes), index)
    return max(kinds.values()) + 1


def _label(call: Call, made: Recorded) -> str:
    name = call.name
    outer = [each for each in call.used if each is not None and each.storage.operand is not None]
    weights = [each for each in outer if len(each.shape) > 1 or each.dtype == np.uint8]
    if name in _OVER_POOLS or not weights:
        return f"{name} {made.shape[1]} {made.dtype.name}"
    widest = max(weights, key=lambda each: int(np.prod(each.shape)))
    return f"{name} {'x'.join(map(str, widest.shape))} {widest.dtype.name}"


def _padded(values: npt.NDArray[Any], size: int) -> _Indices:
    padded = np.zeros(size, np.int32)
    padded[: len(values)] = values
    return padded


def _not_exact(operation: str, step: str) -> ConfigError:
    return ConfigError(
        f"the kernels for this device are not exact: {operation} has other bits in {step} than in "
        f"the largest; use --ops reference, and report the device and its driver"
    )
