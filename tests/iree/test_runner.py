"""The runner over compiled modules: its memory, and what its guarantees rest on."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cadenza.backends.base import RunnerSetup
from cadenza.backends.iree.manifest import Manifest, read_manifest
from cadenza.batch.step_schema import ModelInputs
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.errors import RunnerError
from tests.contract.backends import COMPILED_LIMITS
from tests.contract.checks import CHECKS, OTHER, PROMPT, Bench, generate, stream_on
from tests.contract.steps import copy_of

SLOT = 2048  # tokens of a slot of the bundled model's modules


def parts_of(bench: Bench) -> Any:
    runner: Any = bench.runner
    return runner._thread.held


def state_of(bench: Bench) -> list[np.ndarray]:
    steps = parts_of(bench)
    return [steps._device.read(view) for view in steps._state]


def addresses(bench: Bench) -> list[int]:
    views = parts_of(bench)._state
    return [view.map().asarray(view.shape, np.dtype(np.float32)).ctypes.data for view in views[:2]]


def broken(change: Callable[[ModelInputs], ModelInputs]) -> Bench:
    from cadenza.backends.iree.runner import IreeRunner

    class Broken(IreeRunner):
        def launch(self, inputs: ModelInputs) -> Any:
            return super().launch(change(inputs))

    checkpoint = open_checkpoint(None)
    setup = RunnerSetup(limits=COMPILED_LIMITS, fill=float("nan"))
    runner = Broken(checkpoint, read_manifest(checkpoint.folder), setup)
    runner.warmup()
    return Bench(runner, COMPILED_LIMITS)


def test_an_admitted_prompt_writes_its_slot_and_no_other(bench: Bench):
    generate(bench, stream_on(1, [2]))
    before = state_of(bench)
    bench.run(stream_on(3, [5]).chunk(PROMPT[:9], samples=False))
    for old, new in zip(before[:2], state_of(bench)[:2], strict=True):
        changed = np.flatnonzero((old.view(np.uint32) != new.view(np.uint32)).any(axis=(1, 2, 3)))
        assert changed.tolist() == list(range(5 * SLOT, 5 * SLOT + 9))
    history = np.flatnonzero(before[3] != state_of(bench)[3])
    assert history.tolist() == list(range(5 * SLOT, 5 * SLOT + 9))


def test_a_step_takes_the_state_over_and_makes_the_next_one_in_its_place(bench: Bench):
    """So a state is used once: what was taken over shows the new bytes."""
    stream, steps = stream_on(0, [0]), parts_of(bench)
    bench.run(stream.chunk(OTHER, samples=True))
    places, old = addresses(bench), steps._state
    bench.run(stream.next_token())
    assert addresses(bench) == places
    assert np.array_equal(steps._device.read(old[3]), state_of(bench)[3])


def test_memory_stays_the_same_over_a_thousand_steps(bench: Bench):
    stream = stream_on(0, [0])
    bench.run(stream.chunk(OTHER, samples=True))

    def decode(count: int) -> int:
        for _ in range(count):
            stream.num_computed = len(OTHER)
            bench.run(stream.next_token())
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

    before = decode(50)
    assert decode(1000) - before < 1024, "KiB"


def test_the_state_of_another_bucket_is_refused(bench: Bench):
    """The modules for 8 rows do not take the state of those for 4."""
    from cadenza.backends.iree.runner import IreeRunner

    limits = replace(COMPILED_LIMITS, num_pages=4)
    checkpoint = open_checkpoint(None)
    manifest = read_manifest(checkpoint.folder)
    small = IreeRunner(checkpoint, manifest, RunnerSetup(limits=limits))
    small.warmup()
    steps, others = parts_of(bench), small._thread.held
    assert others is not None
    steps._state, others._state = others._state, steps._state
    for runner in (bench.runner, small):
        with pytest.raises(RunnerError, match=r"shape|size|tensor"):
            Bench(runner, COMPILED_LIMITS).run(stream_on(0, [0]).chunk([5], samples=True))
        with pytest.raises(RunnerError, match="reset"):
            Bench(runner, COMPILED_LIMITS).run(stream_on(0, [0]).chunk([5], samples=True))
    small.close()


@pytest.mark.parametrize(
    ("field", "place", "value"),
    [
        ("tokens.slots", 0, 8 * 96),
        ("tokens.positions", 0, SLOT),
        ("tokens.ids", 0, 2560),
        ("logits.token_indices", 0, 8),
        ("logits.rule_record", 0, 8 + 64),
        ("logits.rows", 1, 8),
    ],
)
def test_an_index_that_is_one_too_large_is_refused_before_it_reaches_the_device(
    bench: Bench, field: str, place: int, value: int
):
    stream = stream_on(0, [0])
    inputs = bench.inputs(stream.chunk([5], samples=True))
    group, _, name = field.partition(".")
    getattr(getattr(inputs, group), name)[place] = value
    with pytest.raises(RunnerError, match="outside"):
        bench.runner.launch(inputs).result()
    bench.runner.reset()
    generate(bench, stream)


def test_a_slot_that_is_one_too_large_is_seen_by_the_contract():
    def shift(inputs: ModelInputs) -> ModelInputs:
        other = copy_of(inputs)
        other.tokens.slots[(other.tokens.slots >= 0) & (other.tokens.positions == 3)] += 1
        return other

    with pytest.raises(AssertionError):
        CHECKS["a_rows_result_is_the_same_in_every_row"](broken(shift))


def test_a_row_that_keeps_a_stale_slot_is_seen_by_the_contract():
    def forget(inputs: ModelInputs) -> ModelInputs:
        updates = inputs.page_updates
        return replace(inputs, page_updates=updates[updates[:, 2] != 4])

    with pytest.raises(AssertionError):
        CHECKS["a_changed_page_table_entry_is_used"](broken(forget))


def test_a_field_that_the_modules_do_not_know_must_have_no_effect():
    from cadenza.backends.iree.manifest import WireMap

    manifest = read_manifest(open_checkpoint(None).folder)
    program = manifest.buckets[0].program("decode")
    kept = tuple(each for each in program.fields if each.name != "tokens.reaches")
    wire = WireMap(msgspec.structs.replace(program, fields=kept), 4, SLOT, manifest)
    inputs = ModelInputs.empty(bucket=4, num_rows=4)
    wire.words(inputs)
    inputs.tokens.reaches[0] = 3
    with pytest.raises(RunnerError, match=r"tokens\.reaches"):
        wire.words(inputs)


def test_weights_of_a_written_folder_are_used_where_the_file_is_mapped(
    bench: Bench, tmp_path: Path
):
    """Only the factors of the rope are made, and every bit is that of the bundled model, which is
    in bfloat16."""
    from cadenza.backends.exporting import Modules, write_model
    from cadenza.backends.iree.runner import IreeRunner

    bundled = open_checkpoint(None)
    manifest = read_manifest(bundled.folder)
    names = [program.file for bucket in manifest.buckets for program in bucket.programs]
    files = {name: (bundled.folder / "iree" / name).read_bytes() for name in names}
    write_model(bundled, Modules(manifest=manifest, files=files), tmp_path)
    written = open_checkpoint(tmp_path)
    setup = RunnerSetup(limits=COMPILED_LIMITS, fill=float("nan"))
    runner = IreeRunner(written, read_manifest(tmp_path), setup)
    runner.warmup()
    assert runner.num_copied_bytes == rope_bytes(manifest)
    assert bench.runner.num_copied_bytes > 10_000_000  # type: ignore[attr-defined]
    expected = generate(bench, stream_on(0, [0]))
    bench.assert_same(generate(Bench(runner, COMPILED_LIMITS), stream_on(0, [0])), expected, "bits")
    runner.close()


def rope_bytes(manifest: Manifest) -> int:
    (rope,) = (each for each in manifest.parameters if each.rope is not None)
    return 4 * int(np.prod(rope.array.shape))
