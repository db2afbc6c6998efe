"""`XlaRunner`: `backends.base.Runner` on JAX: launches compiled steps over donated device state.
Owns the weights, the state and the programs of one model on one device. Invariants: KV pools are
updated in place, steps run in launch order, nothing compiles after `warmup`, nothing runs after
`close`."""

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from cadenza.backends.base import Capability, ImageWork, RunnerSetup
from cadenza.backends.token_choice import read_result
from cadenza.backends.xla.decoder import DecoderWeights, load_decoder, load_mtp_layer
from cadenza.backends.xla.device import DeviceMesh, SingleDevice, find_devices
from cadenza.backends.xla.device_state import (
    ITEMS_PER_CALL,
    MASK_ROWS,
    PAGE_COPIES,
    PAGE_UPDATES,
    CopyPrograms,
    DeviceState,
    abstract_state,
    bytes_of_items,
    padded_items,
    parts_of_items,
    span_rows,
)
from cadenza.backends.xla.in_flight import InFlight
from cadenza.backends.xla.layers.weight_source import WeightSource
from cadenza.backends.xla.ops.program_ops import ProgramOps
from cadenza.backends.xla.ops.table import DecoderSpec
from cadenza.backends.xla.programs import Programs, compile_programs
from cadenza.backends.xla.span_passes import SpanPasses
from cadenza.backends.xla.step_program import can_split_steps
from cadenza.backends.xla.tables import MakeOps, choose_table, takes_portable_kernels
from cadenza.backends.xla.vision.encoder import ImageEncoder, part_of
from cadenza.batch.step_schema import (
    NO_HIDDEN,
    ImageCall,
    Int32Array,
    MaskUpdate,
    ModelInputs,
    SpanCall,
    StepOutput,
)
from cadenza.batch.whole_spans import SpanShape
from cadenza.errors import RunnerError
from cadenza.kernel_proof import KernelProof
from cadenza.models.model_config import ModelConfig
from cadenza.models.split import Rank, split_model, split_weights
from cadenza.request import Attachment
from cadenza.weights.weights import Weights

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class XlaStepHandle:
    """`key` identifies the step's result [L, C] in `in_flight`, with its last hidden states [L, E]
    if `hidden_rows` [H] of them are needed."""

    key: int
    num_logits: int
    hidden_rows: Int32Array
    in_flight: InFlight

    def rows(self) -> Int32Array:
        """The raw result [L, C]. Call either this or `result`, once: reading releases the step."""
        return self._read()[0]

    def result(self) -> StepOutput:
        found, *hidden = self._read()
        needed = hidden[0][self.hidden_rows].astype(np.float32) if hidden else NO_HIDDEN
        return read_result(found[: self.num_logits], needed)

    def _read(self) -> tuple[np.ndarray[Any, Any], ...]:
        return self.in_flight.read(self.key)


@dataclass(slots=True)
class XlaLateStepHandle(XlaStepHandle):
    """A launched step whose layers run; `finish` dispatches the rest of it."""

    finish: Callable[[Sequence[MaskUpdate]], None]
    is_chosen: bool = False

    def choose(self, masks: Sequence[MaskUpdate]) -> None:
        if self.is_chosen:
            raise RunnerError("the tokens of the step were chosen")
        self.finish(masks)
        self.is_chosen = True

    def _read(self) -> tuple[np.ndarray[Any, Any], ...]:
        if not self.is_chosen:
            raise RunnerError("the step waits for its masks; call choose first")
        return self.in_flight.read(self.key)


@dataclass(slots=True, eq=False)
class StateHolder:
    """The device state of a runner, and of those that use it; None while a step has it, before
    warm-up and after a failure."""

    state: DeviceState | None = None


class XlaRunner:
    """One model on one device, compiled for the rows, pages and token budget of `limits`."""

    def __init__(
        self,
        model: ModelConfig,
        weights: Weights,
        setup: RunnerSetup,
        make_ops: MakeOps | None = None,
    ) -> None:
        """`make_ops` constructs the op table; None selects that of `setup.ops`."""
        limits, kv_of, hidden_of = setup.limits, setup.kv_of, setup.hidden_of
        assert isinstance(kv_of, XlaRunner | None), "KV is shared within one backend"
        assert isinstance(hidden_of, XlaRunner | None), "states are read within one backend"
        is_split = setup.ops == "split"
        devices = find_devices(setup.device, setup.num_devices)
        self._device = devices[0]
        self._placement = DeviceMesh(devices) if is_split else SingleDevice(devices[0])
        self._model = model
        self._limits = limits
        self._spec = DecoderSpec(
            model=split_model(model, setup.num_devices) if is_split else model,
            dtype=jnp.dtype(setup.dtype).type,
            page_size=limits.page_size,
            quantization=setup.quantization,
            kv_cache_dtype=setup.kv_cache_dtype,
            is_portable=takes_portable_kernels(model, weights, setup),
            num_devices=setup.num_devices,
            is_sparse="sparse_prompts" in setup.capabilities,
        )
        make_ops = make_ops or choose_table(setup.ops, self._device, model).table.new_ops
        self._ops = make_ops(self._spec)
        self._buckets = self._ops.token_buckets(limits.max_num_batched_tokens)
        self._setup = replace(setup, kv_of=None, hidden_of=None)
        self._hidden_of = hidden_of
        with self._ops.loading(setup.packed_weights), jax.default_device(self._device):
            loaded = self._placement.put(partial(self._load, weights))
        self._weights: DecoderWeights | None = loaded
        self._encoder: ImageEncoder | None = None
        if kv_of is None and self._sees:
            self._encoder = ImageEncoder(self._spec, make_ops)
            self._encoder.load(weights, self._device)
        self._spans: SpanPasses | None = None
        if kv_of is None and span_rows(self._ops, model, setup):
            self._spans = SpanPasses(self._ops, self._spec, setup, self._device.platform)
        self._programs: Programs | None = None
        self._proof: KernelProof | None = None
        self._owns_state = kv_of is None
        self._holder = StateHolder() if kv_of is None else kv_of.state_holder
        self._in_flight = InFlight(self)

    def _load(self, weights: Weights, index: int) -> DecoderWeights:
        if self._setup.ops == "split":
            rank = Rank(index, self._setup.num_devices)
            weights = split_weights(weights, self._model, rank)
        source, longest = WeightSource(self._ops, self._spec, weights), self._limits.max_model_len
        if not self._model.reads_hidden:
            return load_decoder(source, longest)
        assert self._hidden_of is not None, "it reads the states of another runner"
        return load_mtp_layer(source, longest, self._hidden_of.weights)

    @property
    def name(self) -> str:
        return f"xla:{self._device.platform} ({self._ops.name} ops)"

    @property
    def capabilities(self) -> frozenset[Capability]:
        found: set[Capability] = {"logprobs", "drafts", *self._setup.capabilities}
        if self._can_split_steps:
            found.add("late_masks")
        if self._encoder is not None:
            found.add("attachments")
            if self._model.vision is not None and self._model.vision.whole_span:
                found.add("whole_spans")
        return frozenset(found)

    @property
    def _sees(self) -> bool:
        return self._model.vision is not None and self.num_image_slots > 0

    @property
    def num_image_slots(self) -> int:
        return self._setup.num_image_slots

    def image_work(self, part: Attachment) -> ImageWork:
        assert self._encoder is not None, "the runner encodes images"
        return self._encoder.work(part)

    @property
    def span_shape(self) -> SpanShape | None:
        return None if self._spans is None else self._spans.shape

    def check_image(self, part: Attachment) -> None:
        assert self._model.vision is not None, "the model sees"
        self._model.vision.processor.check(part_of(part))

    @property
    def _can_split_steps(self) -> bool:
        return can_split_steps(self._ops, self._model)

    @property
    def proof(self) -> KernelProof | None:
        return self._proof

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def hidden_size(self) -> int:
        return self._model.hidden_size

    @property
    def token_buckets(self) -> tuple[int, ...]:
        return self._buckets

    @property
    def state_holder(self) -> StateHolder:
        return self._holder

    @property
    def kept_hidden(self) -> jax.Array:
        if self._state is None:
            raise RunnerError("the device lost its state; call reset() first")
        assert self._state.kept_hidden is not None, "the runner keeps hidden states"
        return self._state.kept_hidden

    @property
    def _state(self) -> DeviceState | None:
        return self._holder.state

    @_state.setter
    def _state(self, state: DeviceState | None) -> None:
        self._holder.state = state

    @property
    def weights(self) -> DecoderWeights:
        if self._weights is None:
            raise RunnerError("the runner was closed; make a new one")
        return self._weights

    @property
    def programs(self) -> Programs:
        if self._programs is None:
            raise RunnerError("the runner was not warmed up; call warmup() first")
        return self._programs

    def warmup(self) -> None:
        """Compiles every program and runs each step program once with no tokens. Raises ConfigError
        if the kernels are proved at load and are not exact."""
        setup, weights = self._setup, self.weights
        if self._ops.is_proved_at_load:  # while the pools take no memory
            self._proof = self._prove(weights)
        self._programs = compile_programs(self._ops, self._spec, setup, weights, self._placement)
        if self._encoder is not None:
            sharding = SingleDeviceSharding(self._device)
            state = abstract_state(self._ops, self._spec, setup, sharding)
            self._encoder.compile(state.tower, state.image_rows, sharding)
            if self._spans is not None:
                self._spans.compile(weights, state, sharding)
        self.reset()
        for bucket in self._buckets:
            inputs = ModelInputs.empty(bucket=bucket, num_rows=self._limits.max_num_seqs)
            self.launch(inputs).result()
            if self._can_split_steps:
                late = self.launch(replace(inputs, masks_follow=True))
                assert isinstance(late, XlaLateStepHandle)
                late.choose(())
                late.result()

    def _prove(self, weights: DecoderWeights) -> KernelProof:
        from cadenza.backends.xla.kernel_proof import prove_kernels

        assert isinstance(self._ops, ProgramOps), "the table records programs"
        with jax.default_device(self._device):
            proof = prove_kernels(self._ops, self._spec, self._limits, weights)
        logger.info("%s", proof.summary)
        return proof

    def launch(self, inputs: ModelInputs) -> XlaStepHandle:
        programs = self.programs
        bucket = len(inputs.tokens.ids)
        if bucket not in programs.step:
            raise RunnerError(f"no program for {bucket} tokens; the buckets are {self._buckets}")
        if inputs.masks_follow and bucket not in programs.begin:
            raise RunnerError("the op table cannot choose a step's tokens after its launch")
        with self._in_flight.lock:
            self._in_flight.check_open()
            results = self._start(programs, bucket, inputs)
            key = self._in_flight.add(*results)
            del results
        step = key, inputs.num_logits, inputs.hidden_rows, self._in_flight
        if inputs.masks_follow:
            return XlaLateStepHandle(*step, partial(self._finish, key, inputs))
        return XlaStepHandle(*step)

    def _start(self, programs: Programs, bucket: int, inputs: ModelInputs) -> tuple[jax.Array, ...]:
        if inputs.image_calls:
            self._encode(inputs.image_calls)
        state = self._update_state(programs, inputs)
        for call in inputs.span_calls:
            state = self._compute_span(state, call)
        if inputs.masks_follow:
            self._state, hidden = programs.begin[bucket](self._weights, state, inputs.words)
            return (hidden,)
        state = self._write_masks(programs, state, inputs.mask_updates)
        kept = () if self._hidden_of is None else (self._hidden_of.kept_hidden,)
        step = programs.step[bucket]
        self._state, result, hidden = step(self._weights, state, inputs.words, *kept)
        return self._sent(inputs, result, hidden)

    def _compute_span(self, state: DeviceState, call: SpanCall) -> DeviceState:
        if self._spans is None:
            raise RunnerError("the runner computes no spans in passes")
        return self._spans.run(self.weights, state, call)

    def _encode(self, calls: Sequence[ImageCall]) -> None:
        if self._encoder is None:
            raise RunnerError("the runner encodes no images; load it with image slots")
        self._encoder.check(calls)
        state = self._take_state()
        assert state.tower is not None, "the runner has image slots"
        tower, rows = self._encoder.run(state.tower, state.image_rows, calls)
        self._state = state._replace(tower=tower, image_rows=rows)

    def _finish(self, key: int, inputs: ModelInputs, masks: Sequence[MaskUpdate]) -> None:
        programs = self.programs
        choose = programs.choose[len(inputs.tokens.ids)]
        with self._in_flight.lock:
            self._in_flight.check_open()
            (hidden,) = self._in_flight.results(key)
            state = self._write_masks(programs, self._take_state(), masks)
            rows, result = choose(self.weights.lm_head, state.rows, inputs.words, hidden)
            self._state = state._replace(rows=rows)
            self._in_flight.replace(key, *self._sent(inputs, result, hidden))
            del hidden, result

    def _update_state(self, programs: Programs, inputs: ModelInputs) -> DeviceState:
        state = self._take_state()
        for start in range(0, len(inputs.page_updates), PAGE_UPDATES):
            part = inputs.page_updates[start : start + PAGE_UPDATES]
            rows = programs.rows.write_page_table(state.rows, self._padded_updates(part))
            state = state._replace(rows=rows)
        for start in range(0, len(inputs.page_copies), PAGE_COPIES):
            part = inputs.page_copies[start : start + PAGE_COPIES]
            padded = np.zeros((PAGE_COPIES, 3), np.int32)
            padded[: len(part)] = part
            state = programs.copy_pages(state, padded, np.int32(len(part)))
        for update in inputs.rule_updates:
            rows = programs.rows.write_rules(state.rows, np.int32(update.row), update.record)
            state = state._replace(rows=rows)
        return state

    def _write_masks(
        self, programs: Programs, state: DeviceState, masks: Sequence[MaskUpdate]
    ) -> DeviceState:
        for start in range(0, len(masks), MASK_ROWS):
            part = masks[start : start + MASK_ROWS]
            record_rows, words = self._padded_masks(part)
            rows = state.rows
            if any(update.record != update.row for update in part):
                rows = programs.rows.copy_rules(rows, record_rows)
            rows = programs.rows.write_masks(rows, np.ascontiguousarray(record_rows[:, 0]), words)
            state = state._replace(rows=rows)
        return state

    def _sent(
        self, inputs: ModelInputs, result: jax.Array, hidden: jax.Array
    ) -> tuple[jax.Array, ...]:
        results = (result, hidden) if len(inputs.hidden_rows) else (result,)
        # On the CPU the result is in host memory already, and in jax 0.11 this call makes an XLA
        # thread acquire the GIL after the step.
        if self._device.platform != "cpu":
            for each in results:
                each.copy_to_host_async()
        return results

    def read_pages(self, page_ids: Sequence[int]) -> list[bytes]:
        return self._read_items(self._copiers(self.programs.pages), page_ids)

    def write_pages(self, page_ids: Sequence[int], contents: Sequence[bytes]) -> None:
        self._write_items(self._copiers(self.programs.pages), page_ids, contents)

    def read_states(self, slots: Sequence[int]) -> list[bytes]:
        return self._read_items(self._copiers(self.programs.states), slots)

    def write_states(self, slots: Sequence[int], contents: Sequence[bytes]) -> None:
        self._write_items(self._copiers(self.programs.states), slots, contents)

    def _read_items(self, programs: CopyPrograms, items: Sequence[int]) -> list[bytes]:
        contents = list[bytes]()
        for start in range(0, len(items), ITEMS_PER_CALL):
            part = items[start : start + ITEMS_PER_CALL]
            with self._reading() as state:
                contents += bytes_of_items(programs.read(state, padded_items(part)), len(part))
        return contents

    def _write_items(
        self, programs: CopyPrograms, items: Sequence[int], contents: Sequence[bytes]
    ) -> None:
        for start in range(0, len(items), ITEMS_PER_CALL):
            part = items[start : start + ITEMS_PER_CALL]
            parts = parts_of_items(programs.parts, contents[start : start + ITEMS_PER_CALL])
            with self._in_flight.lock:
                self._in_flight.check_open()
                state, count = self._take_state(), np.int32(len(part))
                self._state = programs.write(state, padded_items(part), parts, count)

    def _copiers(self, programs: CopyPrograms | None) -> CopyPrograms:
        if programs is None:
            raise RunnerError(
                "the runner copies none of these; load it with the capability page_copies"
            )
        return programs

    def read_scores(self, row: int, num_tokens: int, num_queries: int) -> npt.NDArray[np.float32]:
        read = self.programs.read_scores
        if read is None:
            raise RunnerError("the runner scores no prompts; load it with the capability scores")
        with self._reading() as state:
            sums = np.array(read(state.pools.scores, np.int32(row)), np.float32)
        return np.divide(sums[:num_tokens], num_queries, dtype=np.float32)

    @contextmanager
    def _reading(self) -> Generator[DeviceState]:
        """The state, which is only read; no array of the device outlives the lock."""
        with self._in_flight.lock:
            self._in_flight.check_open()
            self._state = state = self._take_state()
            yield state

    def reset(self) -> None:
        self._in_flight.finish()
        if not self._owns_state:
            return
        with self._in_flight.lock:
            if self._encoder is not None:
                self._encoder.drop_part()
            self._state = None  # frees the old pools before the new ones are allocated
            self._state = self.programs.new_state()

    def close(self) -> None:
        self._in_flight.close()
        if self._owns_state:
            self._state = None
        self._weights = None
        self._programs = None
        if self._encoder is not None:
            self._encoder.close()

    def _take_state(self) -> DeviceState:
        if self._state is None:
            raise RunnerError("the device lost its state; call reset() first")
        state, self._state = self._state, None
        return state

    def _padded_updates(self, part: Int32Array) -> Int32Array:
        return np.pad(part, ((0, PAGE_UPDATES - len(part)), (0, 0)), mode="edge")

    def _padded_masks(self, part: Sequence[MaskUpdate]) -> tuple[Int32Array, Int32Array]:
        record_rows = np.array([(update.record, update.row) for update in part], np.int32)
        masks = np.array([update.mask for update in part], np.int32)
        padding = ((0, MASK_ROWS - len(part)), (0, 0))
        return np.pad(record_rows, padding, mode="edge"), np.pad(masks, padding, mode="edge")
