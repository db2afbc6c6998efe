"""From a model and options to a verdict: what `cadenza verify` runs.

Builds one runner, whose unowned KV slots hold NaN, and plays every mode on it; the self-test builds
one runner a fault. Knows the backends by name only.
"""

import tempfile
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cadenza.backends.base import Runner
from cadenza.checkpoint import (
    Checkpoint,
    named_shape,
    open_checkpoint,
    write_random_checkpoint,
)
from cadenza.config import EngineConfig, EngineLimits
from cadenza.engine.build import build_reference, build_runner, find_checkpoint, plan_model
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.plan import EnginePlan
from cadenza.engine.verification.gate import Gate, GateResult, ReferenceKind, Report, Witness
from cadenza.engine.verification.modes import MakeCore
from cadenza.engine.verification.option_matrix import OptionMatrix
from cadenza.engine.verification.self_test import SelfTestResult, run_self_test
from cadenza.engine.verification.workload import (
    LONGEST_PROMPT,
    Arrival,
    WorkloadShape,
    make_workload,
)

NAN = float("nan")

RANDOM_SEED = 20

MODEL_SAMPLED, RANDOM_SAMPLED = 0.5, 0.8
"""Shares of sampled requests: random weights are played mostly at temperatures around 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """What `cadenza verify` was asked for; `shape` stands instead of `model`.

    With a `matrix` of sampling options each of its rows is a request, whatever `num_requests`.
    """

    model: str | None = None
    shape: str | None = None
    num_requests: int = 16
    max_tokens: int = 48
    seed: int = 0
    reference: ReferenceKind = "both"
    matrix: OptionMatrix | None = None
    config: EngineConfig


def verify(options: VerifyOptions, report: Report) -> tuple[GateResult, EnginePlan]:
    """Plays the gate.

    Raises:
        CheckpointError, ConfigError, DeviceUnavailableError: nothing could be played.
    """
    with _checkpoint(options) as checkpoint:
        plan = _plan(options, checkpoint)
        report("loading and compiling")
        runner = build_runner(checkpoint, plan, options.config, fill=NAN)
        with closing(runner):
            make_core = _maker(runner, checkpoint)
            with _witness(options, checkpoint, plan, make_core) as witness:
                workload = _workload(options, checkpoint, plan)
                gate = _gate(options, workload, make_core, witness, report)
                return gate.run(), plan


def self_test(options: VerifyOptions, report: Report) -> SelfTestResult:
    """Plays the gate soundly and with each known fault, on the reference op table."""
    from cadenza.backends.xla.mutants import MUTANTS, sound_table
    from cadenza.backends.xla.runner import RunnerOptions, XlaRunner

    options = replace(options, reference="solo", config=replace(options.config, ops="reference"))
    with _checkpoint(options) as checkpoint:
        plan = _plan(options, checkpoint)

        def run_with(fault: str | None) -> GateResult:
            report(f"fault: {fault or 'none'}")
            runner = XlaRunner(
                checkpoint.config,
                checkpoint.weights,
                plan.limits,
                RunnerOptions(
                    device=options.config.device,
                    make_ops=sound_table if fault is None else MUTANTS[fault],
                    fill=NAN,
                ),
            )
            with closing(runner):
                runner.warmup()
                workload = _workload(options, checkpoint, plan)
                return _gate(options, workload, _maker(runner, checkpoint), None, report).run()

        return run_self_test(run_with, list(MUTANTS))


@contextmanager
def _checkpoint(options: VerifyOptions) -> Generator[Checkpoint]:
    """The named model, or a random one of the named shape in a folder that is removed again."""
    if options.shape is None:
        yield find_checkpoint(options.model, revision=options.config.revision)
        return
    with tempfile.TemporaryDirectory(prefix="cadenza-verify-") as folder:
        shape = named_shape(options.shape)
        write_random_checkpoint(shape, Path(folder), seed=RANDOM_SEED, dtype=shape.dtype)
        yield open_checkpoint(Path(folder))


def _plan(options: VerifyOptions, checkpoint: Checkpoint) -> EnginePlan:
    """The user's options, with the context cut to what the workload can use."""
    longest = min(LONGEST_PROMPT + options.max_tokens, checkpoint.config.max_position_embeddings)
    config = options.config
    if config.max_model_len is None:
        config = replace(config, max_model_len=longest)
    return plan_model(checkpoint, config)


@contextmanager
def _witness(
    options: VerifyOptions, checkpoint: Checkpoint, plan: EnginePlan, make_core: MakeCore
) -> Generator[Witness | None]:
    """The reference engine, and the float32 engines that are compared with it."""
    if options.reference == "solo":
        yield None
        return
    reference = build_reference(checkpoint, max_model_len=plan.limits.max_model_len)
    if plan.dtype == "float32":
        yield Witness(reference=reference, make_core=make_core)
        return
    config = replace(options.config, dtype="float32", max_model_len=plan.limits.max_model_len)
    runner = build_runner(checkpoint, plan_model(checkpoint, config), config, fill=NAN)
    with closing(runner):
        yield Witness(reference=reference, make_core=_maker(runner, checkpoint))


@dataclass(frozen=True, slots=True)
class _Workload:
    """What is played, within which limits."""

    limits: EngineLimits
    arrivals: tuple[Arrival, ...]
    matrix: OptionMatrix | None


def _workload(options: VerifyOptions, checkpoint: Checkpoint, plan: EnginePlan) -> _Workload:
    matrix = options.matrix
    shape = WorkloadShape(
        num_requests=options.num_requests if matrix is None else len(matrix.rows),
        rows=plan.limits.max_num_seqs,
        max_tokens=options.max_tokens,
        context=plan.limits.max_model_len,
        vocab_size=checkpoint.config.vocab_size,
        sampled_share=MODEL_SAMPLED if options.shape is None else RANDOM_SAMPLED,
        seed=options.seed,
    )
    arrivals = make_workload(shape)
    if matrix is not None:
        arrivals = matrix.apply(
            arrivals, vocab_size=shape.vocab_size, eos_token_ids=checkpoint.eos_token_ids
        )
    num_samples = sum(arrival.request.params.n for arrival in arrivals)
    return _Workload(replace(plan.limits, max_num_queued_reqs=num_samples), arrivals, matrix)


def _gate(
    options: VerifyOptions,
    workload: _Workload,
    make_core: MakeCore,
    witness: Witness | None,
    report: Report,
) -> Gate:
    return Gate(
        make_core=make_core,
        limits=workload.limits,
        arrivals=workload.arrivals,
        witness=witness,
        with_solo=options.reference != "independent",
        clock=time.perf_counter,
        report=report,
        coverage=None if workload.matrix is None else workload.matrix.coverage(),
    )


def _maker(runner: Runner, checkpoint: Checkpoint) -> MakeCore:
    eos = frozenset(checkpoint.eos_token_ids)

    def make_core(limits: EngineLimits, options: CoreOptions) -> EngineCore:
        runner.reset()
        return EngineCore(runner, limits, replace(options, eos_token_ids=eos))

    return make_core
