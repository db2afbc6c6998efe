"""The gate with images: green on the sound engine, red on each fault of images."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from cadenza import LLM
from cadenza.backends.fake import FakeRunner
from cadenza.batch.packing import Packer
from cadenza.config import EngineLimits, ImageLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.loop import StepRunner
from cadenza.errors import ConfigError, InvalidRequestError
from cadenza.verification.faults import IMAGE_FAULTS, absent_faults, digest_without_sides
from cadenza.verification.modes import ImageSpans, image_modes
from cadenza.verification.verifier import Verifier, VerifierResult
from cadenza.verification.workload import (
    Arrival,
    ImageShape,
    WorkloadShape,
    largest_span,
    make_image_workload,
    make_workload,
    without_placeholders,
)
from cadenza.vision.processor import Detail, ImagePart, ImagePlan, Run
from training.vision.scenes import COLOURS, Scene, Thing, draw_image

VOCAB, IMAGE = 97, 3
LIMITS = EngineLimits(
    max_num_seqs=4,
    max_num_batched_tokens=64,
    max_model_len=256,
    page_size=16,
    num_pages=80,
    max_num_queued_reqs=32,
    images=ImageLimits(token_id=IMAGE, num_slots=200),
)


@dataclass(frozen=True, kw_only=True)
class Squares:
    """A token for each 16 x 16 pixels, up to 24 tokens, between two marks; rows may end in one."""

    placeholder: str = "<image>"
    token: str = "<image>"
    settings: bytes = b"squares"
    has_breaks: bool = False
    is_square: bool = False

    def plan(self, width: int, height: int, detail: Detail = "auto") -> ImagePlan:
        rows, columns = height // 16, width // 16
        if rows * columns > 24 or (self.is_square and rows != columns):
            raise InvalidRequestError("too large")
        part = ImagePart(width=width, height=height, rows=rows, columns=columns)
        runs: list[str | Run] = [Run(0, rows * columns)]
        if self.has_breaks:
            runs = [each for _ in range(rows) for each in (Run(0, columns), "break")][:-1]
        return ImagePlan(parts=(part,), pieces=("begin", *runs, "end"))

    def prepare(self, image: object, detail: Detail = "auto") -> tuple[bytes, ...]:
        raise AssertionError("the gate draws no images")

    def check(self, part: ImagePart) -> None:
        assert part.num_tokens

    def patches(self, pixels: bytes, part: ImagePart) -> np.ndarray:
        raise AssertionError("the fake runner encodes bytes")


def shape_of(processor: Squares, **changes: object) -> ImageShape:
    shape = ImageShape(processor=processor, token_id=IMAGE, vocab_size=VOCAB, context=256)
    return replace(shape, **changes)


def arrivals_of(
    shape: ImageShape, *, num_requests: int = 21, max_tokens: int = 12
) -> tuple[Arrival, ...]:
    workload = WorkloadShape(
        num_requests=num_requests,
        rows=4,
        max_tokens=max_tokens,
        context=shape.context,
        vocab_size=VOCAB,
    )
    return make_image_workload(make_workload(workload), shape)


def run_verifier(processor: Squares, fault: str | None = None, **sizes: int) -> VerifierResult:
    found = IMAGE_FAULTS.get(fault or "")
    shape = shape_of(processor)
    if found is not None and found.spoil is None:
        shape = replace(shape, digest_of=digest_without_sides)
    make_packer = Packer if found is None else found.packer
    images = LIMITS.images
    assert images is not None
    runner = FakeRunner(
        max_num_seqs=LIMITS.max_num_seqs,
        max_num_batched_tokens=LIMITS.max_num_batched_tokens,
        max_pages_per_seq=LIMITS.max_pages_per_seq,
        num_pages=LIMITS.num_pages,
        page_size=LIMITS.page_size,
        vocab_size=VOCAB,
        num_image_slots=images.num_slots,
        image_token_id=IMAGE,
    )

    def make_core(limits: EngineLimits, options: CoreOptions) -> EngineCore:
        runner.reset()
        steps = StepRunner(runner, make_packer(limits, VOCAB))
        return EngineCore(runner, limits, options, steps)

    return Verifier(
        make_core=make_core,
        limits=LIMITS,
        arrivals=arrivals_of(shape, **sizes),
        reference=None,
        with_solo=True,
        clock=time.perf_counter,
        image_spans=ImageSpans(longest=largest_span(shape), are_whole=False),
    ).run()


@pytest.mark.parametrize(
    "processor", [Squares(), Squares(has_breaks=True)], ids=["plain", "breaks"]
)
def test_the_gate_passes_with_images_and_shows_what_is_special_to_them(processor: Squares):
    result = run_verifier(processor)
    assert result.passed, result.last_line
    assert result.counts.hits_in_image
    assert result.counts.interrupted
    names = [mode.name for mode in result.modes]
    span = largest_span(shape_of(processor))
    chunks = [f"images in chunks of {size}" for size in range(16, span + 1)]
    assert span > 20
    assert set(chunks) <= set(names)
    assert "engines lost while an image is encoded" in names


@pytest.mark.parametrize("num_requests", range(5, 9))
def test_few_requests_with_short_answers_show_all(num_requests: int):
    result = run_verifier(Squares(), num_requests=num_requests, max_tokens=8)
    assert result.passed, result.last_line


def test_no_mode_has_other_rows_than_the_runner():
    limits = replace(LIMITS, max_num_seqs=20)
    arrivals = arrivals_of(shape_of(Squares()))
    for mode in image_modes(limits, arrivals, ImageSpans(longest=24, are_whole=False)):
        assert mode.limits.max_num_seqs == 20
        assert mode.limits.max_num_batched_tokens >= 20


@pytest.mark.parametrize(
    "fault", [name for name, fault in IMAGE_FAULTS.items() if not fault.needs_axes]
)
def test_the_gate_catches_each_fault_of_images(fault: str):
    for num_requests in (6, 21):
        result = run_verifier(Squares(), fault, num_requests=num_requests)
        assert result.mismatch is not None, result.last_line


def test_faults_that_a_model_cannot_show_are_known():
    arrivals = arrivals_of(shape_of(Squares()), num_requests=6)
    assert absent_faults(arrivals, has_axes=True) == {}
    arrivals = arrivals_of(shape_of(Squares(is_square=True)))
    found = absent_faults(arrivals, has_axes=False)
    assert set(found) == {
        "rows and columns exchanged in rope",
        "the lag of rope dropped at decode",
        "a digest without width and height",
    }
    assert all(found.values())


def test_a_workload_has_images_in_every_place_and_the_same_one_twice():
    arrivals = arrivals_of(shape_of(Squares()))
    requests = [arrival.request for arrival in arrivals]
    seeing = [request for request in requests if request.attachments]
    assert 0 < len(seeing) < len(requests)
    lasts = [len(each.prompt_token_ids) - each.attachments[-1].end for each in seeing]
    assert 2 in lasts, "no prompt ends with an image and the mark behind it"
    digests = [[each.digest for each in request.attachments] for request in seeing]
    assert any(len(found) > len(set(found)) for found in digests)
    beginnings = [request.prompt_token_ids[:20] for request in seeing]
    assert max(map(beginnings.count, beginnings)) > 1
    for request in requests:
        places = [i for i, each in enumerate(request.prompt_token_ids) if each == IMAGE]
        spans = [(each.start, each.end, each.rows * each.columns) for each in request.attachments]
        assert len(places) == sum(count for *_, count in spans)
        assert all(start in places and end - 1 in places for start, end, _ in spans)


def test_two_images_of_a_workload_have_the_same_bytes_and_other_sides():
    found: dict[bytes, set[tuple[int, int]]] = {}
    for arrival in arrivals_of(shape_of(Squares())):
        for each in arrival.request.attachments:
            found.setdefault(each.payload, set()).add((each.width, each.height))
    assert max(map(len, found.values())) == 2


def test_a_context_that_holds_no_image_is_refused():
    with pytest.raises(ConfigError, match="raise --max-model-len"):
        shape_of(Squares(), context=16).plans  # noqa: B018  what it raises is the point


def test_placeholders_that_stand_for_nothing_become_text():
    arrivals = make_workload(
        WorkloadShape(num_requests=5, rows=4, max_tokens=4, context=64, vocab_size=5)
    )
    shape = replace(shape_of(Squares()), vocab_size=5, token_id=4)
    prompts: Sequence[tuple[int, ...]] = [
        each.request.prompt_token_ids for each in without_placeholders(arrivals, shape)
    ]
    assert not any(4 in prompt for prompt in prompts)
    assert [len(prompt) for prompt in prompts] == [
        len(each.request.prompt_token_ids) for each in arrivals
    ]


def thing(kind: str, colour: str, x: float, y: float, radius: float) -> Thing:
    rgb = COLOURS[colour]
    return Thing(kind=kind, colour=colour, x=x, y=y, radius=radius, angle=0.0, rgb=rgb)


SCENE = Scene(
    background="white",
    background_rgb=COLOURS["white"],
    things=(thing("circle", "red", 0.25, 0.3, 0.16), thing("square", "blue", 0.72, 0.6, 0.2)),
)
ANSWERS = {
    "What colour is the circle?": "red",
    "What shape is blue?": "square",
    "How many shapes are there?": "2",
    "Describe the image.": "A red circle and a blue square on a white background.",
}


@pytest.mark.slow
def test_the_bundled_model_answers_about_an_image_and_says_where_there_is_none():
    image = {"type": "image", "image": draw_image(SCENE, 320, 320)}
    asked = [
        [{"role": "user", "content": [image, {"type": "text", "text": text}]}] for text in ANSWERS
    ]
    llm = LLM("bundled-vision", max_num_seqs=5)
    try:
        outputs = llm.chat([*asked, [{"role": "user", "content": "What colour is the circle?"}]])
    finally:
        llm.close()
    assert [each.outputs[0].text for each in outputs] == [*ANSWERS.values(), "There is no image."]
