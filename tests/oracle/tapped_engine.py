"""Full logits out of our engine, which by itself yields tokens and twenty log probabilities a row.

`TappedOps` wraps an op table and puts the input of its last operation, the hidden state after the
final norm, beside the step's result. The real runner compiles and runs the real programs over it:
paged KV, ragged steps that mix prompt chunks with decodes, every operation of the table under
test. Only the product with the head is done here, in float64. The table's own head is held to the
same logits by its top log probabilities, which come from the same step (`Forced.head_error`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from cadenza.backends.base import RunnerSetup
from cadenza.backends.token_choice import NUM_COLUMNS, NUM_TOP
from cadenza.backends.xla.ops.native import NativeOps
from cadenza.backends.xla.ops.reference import OpTable
from cadenza.backends.xla.ops.table import DecoderSpec, Linear, StepArrays
from cadenza.backends.xla.runner import XlaRunner
from cadenza.batch.packing import rope_positions
from cadenza.batch.step_schema import ImageCall, ModelInputs
from cadenza.batch.whole_spans import WholeSpan, fitting_count, whole_spans_of
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineLimits
from cadenza.models.declaration import EMBEDDING, HEAD
from cadenza.models.model_config import ModelConfig
from cadenza.request import Attachment
from tests.contract.steps import Chunk, Geometry, Stream, build_inputs

Float64Array = npt.NDArray[np.float64]

TABLES: dict[str, Any] = {"reference": OpTable, "native": NativeOps}
MAX_TOKENS = {"reference": 64, "native": 96}
"""Tokens of a step. The native table's is above its decode bucket, so that both buckets run."""

PAGE_SIZE = 16
MAX_STREAMS = 8
MAX_IMAGE_TOKENS = 1024
"""Of all sequences that are computed side by side."""
QUANTA = (5, 1, 11, 3)
"""Of an image that a step computes, in turns."""
CHUNKS = (7, 1, 33, 16, 48)
"""Prompt tokens that the rows take in a step, in turns: below, at and across pages."""


class TappedOps:
    """An op table whose step result ends with the final hidden state's bits: [L, C + E]."""

    def __init__(self, inner: OpTable) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compute(self, decode: Callable[[OpTable], Any]) -> Any:
        return decode(self)

    def next_tokens(self, x: jax.Array, head: Linear, step: StepArrays) -> jax.Array:
        hidden = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)  # [L, E]
        return jnp.concatenate([self._inner.next_tokens(x, head, step), hidden], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """One sequence under teacher forcing.

    `logits` [T, V]: row i predicts token i + 1. `head_error`: the largest difference between a top
    log probability that the step reported and the one that follows from `logits`.
    """

    logits: Float64Array
    head_error: float


class TappedEngine:
    """A checkpoint on one op table, computing given sequences side by side."""

    def __init__(
        self, folder: Path, *, ops: str, dtype: str, config: ModelConfig | None = None
    ) -> None:
        checkpoint = open_checkpoint(folder)
        model = config or checkpoint.config
        stored = checkpoint.weights[EMBEDDING if model.tie_word_embeddings else HEAD]
        self._head = np.asarray(stored).astype(np.float64)  # [V, E]
        self._model = model
        self._budget = MAX_TOKENS[ops]
        self._pages_per_row = -(-min(512, model.max_position_embeddings) // PAGE_SIZE)
        limits = EngineLimits(
            max_num_seqs=self._budget,  # one logit row for each token of a step
            max_num_batched_tokens=self._budget,
            max_model_len=self._pages_per_row * PAGE_SIZE,
            page_size=PAGE_SIZE,
            num_pages=MAX_STREAMS * self._pages_per_row,
            max_num_queued_reqs=1,
            num_state_slots=2 * MAX_STREAMS if model.recurrence else 0,
        )

        def make_ops(spec: DecoderSpec) -> Any:
            return TappedOps(TABLES[ops](spec))

        setup = RunnerSetup(
            limits=limits,
            device="cpu",
            dtype=dtype,
            fill=float("nan"),
            num_image_slots=0 if model.vision is None else MAX_IMAGE_TOKENS,
        )
        self._images: list[dict[int, int]] = []
        self._attachments: Sequence[Sequence[Attachment]] = ()
        self._runner = XlaRunner(model, checkpoint.weights, setup, make_ops)
        self._runner.warmup()

    def embed(self, image: Attachment) -> npt.NDArray[np.float32]:
        """The rows of an image part: [tokens, parts E]."""
        self._runner.reset()
        self._encode([[image]])
        state = self._runner.state_holder.state
        assert state is not None, "it was reset"
        rows = np.asarray(state.image_rows).astype(np.float32)
        return rows[list(self._images[0].values())]

    def force(
        self,
        sequences: Sequence[Sequence[int]],
        num_prompt_tokens: Sequence[int],
        attachments: Sequence[Sequence[Attachment]] = (),
    ) -> list[Forced]:
        """Computes up to eight sequences in common steps, all positions' logits included.

        The first `num_prompt_tokens` of each come in chunks, the others one by one, as decodes do.
        `attachments` are the images of each; every placeholder is one of their tokens.
        """
        self._runner.reset()
        self._encode(attachments)
        pages = np.random.default_rng(0).permutation(MAX_STREAMS * self._pages_per_row)
        table = pages.reshape(MAX_STREAMS, self._pages_per_row).tolist()
        streams = [
            Stream(row=row, pages=table[row], state_slots=self._slots_of(row))
            for row, _ in enumerate(sequences)
        ]
        parts: list[list[npt.NDArray[np.int32]]] = [[] for _ in sequences]
        step = 0
        while True:
            counts = self._counts(sequences, streams, num_prompt_tokens, step)
            if not any(counts):
                break
            chunks = [
                stream.chunk(ids[stream.num_computed : stream.num_computed + count], samples=False)
                for stream, ids, count in zip(streams, sequences, counts, strict=True)
                if count
            ]
            rows = self._launch(chunks)
            for chunk in chunks:
                taken, rows = np.split(rows, [len(chunk.token_ids)])
                parts[chunk.stream.row].append(taken)
            step += 1
        return [self._forced(np.concatenate(each)) for each in parts]

    def _encode(self, attachments: Sequence[Sequence[Attachment]]) -> None:
        """Encodes the images of all sequences, one after the other, into slots that are not in
        order."""
        self._attachments = attachments
        self._images = [{} for _ in attachments]
        free = np.random.default_rng(1).permutation(MAX_IMAGE_TOKENS).astype(np.int32)
        bucket = self._runner.token_buckets[0]
        empty = ModelInputs.empty(bucket=bucket, num_rows=self._budget)
        for places, images in zip(self._images, attachments, strict=True):
            for image in images:
                indices = placeholders_of(image)
                slots, free = free[: len(indices)], free[len(indices) :]
                start, total = 0, len(self._runner.image_work(image))
                while start < total:
                    stop = min(total, start + QUANTA[start % len(QUANTA)])
                    call = ImageCall(attachment=image, start=start, stop=stop, slots=slots)
                    self._runner.launch(replace(empty, image_calls=(call,))).result()
                    start = stop
                places.update(zip(indices, slots.tolist(), strict=True))

    def _write_images(self, inputs: ModelInputs, chunks: list[Chunk]) -> None:
        """Writes image slots and rope positions, as the engine's packer does."""
        begin = 0
        for chunk in chunks:
            end = begin + len(chunk.token_ids)
            row = chunk.stream.row
            slots = [self._images[row].get(index, -1) for index in range(chunk.start, chunk.end)]
            inputs.tokens.image_slots[begin:end] = slots
            inputs.tokens.rope_positions[begin:end] = rope_positions(
                self._attachments[row], chunk.start, chunk.end
            )
            for start, stop in self._spans_of(row):
                inside = slice(max(start, chunk.start), min(stop, chunk.end))
                if inside.start < inside.stop:
                    offset = begin - chunk.start
                    reaches = inputs.tokens.reaches
                    reaches[offset + inside.start : offset + inside.stop] = stop - 1
            begin = end

    def _spans_of(self, row: int) -> tuple[WholeSpan, ...]:
        """Those of a row's images that steps do not cut."""
        vision = self._model.vision
        if vision is None or not vision.whole_span or not self._attachments:
            return ()
        return whole_spans_of(self._attachments[row])

    def _slots_of(self, row: int) -> tuple[int, ...]:
        """The two slots that a row's recurrent state changes between."""
        return () if self._model.recurrence is None else (2 * row + 1, 2 * row)

    def _counts(
        self,
        sequences: Sequence[Sequence[int]],
        streams: Sequence[Stream],
        num_prompt_tokens: Sequence[int],
        step: int,
    ) -> list[int]:
        """Tokens of each row in this step, within the budget."""
        left, counts = self._budget, []
        for stream, token_ids, num_prompt in zip(
            streams, sequences, num_prompt_tokens, strict=True
        ):
            prompt_left = num_prompt - stream.num_computed
            wanted = min(CHUNKS[(step + stream.row) % len(CHUNKS)], prompt_left)
            if prompt_left <= 0:
                wanted = min(1, len(token_ids) - stream.num_computed)
            spans, start = self._spans_of(stream.row), stream.num_computed
            counts.append(fitting_count(spans, start, min(wanted, left), left))
            left -= counts[-1]
        return counts

    def _launch(self, chunks: list[Chunk]) -> npt.NDArray[np.int32]:
        """Results [N, C + E] of all N tokens of the step."""
        buckets = self._runner.token_buckets
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        bucket = min(size for size in buckets if size >= num_tokens)
        geometry = Geometry(bucket=bucket, num_rows=self._budget, page_size=PAGE_SIZE)
        inputs = _with_every_logit(build_inputs(chunks, geometry), chunks)
        if self._attachments:
            self._write_images(inputs, chunks)
        return self._runner.launch(inputs).rows()[:num_tokens]

    def _forced(self, rows: npt.NDArray[np.int32]) -> Forced:
        """From the results [T, C + E] of one sequence."""
        hidden = np.ascontiguousarray(rows[:, NUM_COLUMNS:]).view(np.float32)
        logits = self._shaped(hidden.astype(np.float64) @ self._head.T)
        top_ids, top_bits = np.split(rows[:, NUM_COLUMNS - 2 * NUM_TOP : NUM_COLUMNS], 2, axis=1)
        reported = np.ascontiguousarray(top_bits).view(np.float32)
        expected = np.take_along_axis(log_softmax(logits), top_ids, axis=1)
        return Forced(logits=logits, head_error=float(np.abs(reported - expected).max()))

    def _shaped(self, logits: Float64Array) -> Float64Array:
        """What the model does to its logits before anybody reads them."""
        logits = logits / self._model.logit_divisor
        cap = self._model.logit_soft_cap
        return logits if cap is None else cap * np.tanh(logits / cap)


def placeholders_of(image: Attachment) -> list[int]:
    """The indices of an image's tokens in its prompt, in order: all of its span, or each row of
    them but for a token behind."""
    width = image.columns if image.length == image.rows * image.columns else image.columns + 1
    return [
        image.start + row * width + column
        for row in range(image.rows)
        for column in range(image.columns)
    ]


def log_softmax(logits: npt.NDArray[Any]) -> Float64Array:
    """Natural-log probabilities [T, V] in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _with_every_logit(inputs: ModelInputs, chunks: list[Chunk]) -> ModelInputs:
    """The same step with a greedy logit row, all log probabilities asked for, at every token."""
    inputs.logits.token_indices[: inputs.num_tokens] = np.arange(inputs.num_tokens)
    inputs.logits.rows[: inputs.num_tokens] = np.repeat(
        [chunk.stream.row for chunk in chunks], [len(chunk.token_ids) for chunk in chunks]
    )
    inputs.logits.num_logprobs[:] = NUM_TOP
    inputs.groups.counts.num_logits[0] = inputs.num_tokens
    return inputs
