"""`self_test`: the verifier without a fault, then with each known fault, which it must catch: of
the backend's op table, of what steps say and of masks (`faults`).
Invariant: a fault is planted if the model and the workload can show it.
"""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from cadenza.backends import find_backend, resolve_backend
from cadenza.backends.base import FaultSet, LoadRunner, RunnerSetup
from cadenza.batch.packing import Packer
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import EngineLimits
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.errors import ConfigError
from cadenza.loading.build import constraint_compiler, describe_backend
from cadenza.speculative_config import SpeculativeConfig
from cadenza.structured import CompileConstraint
from cadenza.verification.faults import (
    DRAFT_FAULTS,
    IMAGE_FAULTS,
    MASK_FAULTS,
    STATE_FAULTS,
    STATES,
    FaultyPacker,
    MakePacker,
    absent_faults,
    digest_without_sides,
)
from cadenza.verification.option_matrix import make_forms
from cadenza.verification.run import (
    EngineParts,
    VerifierWorkload,
    VerifyOptions,
    checkpoint_of,
    core_maker,
    prepare_workload,
    verifier_of,
)
from cadenza.verification.verifier import ReportProgress, Verdict, VerifierResult
from cadenza.verification.workload import LONGEST_SHORT_PROMPT, DigestOf
from cadenza.vision.processor import image_digest

# Of models with recurrent states, whose rollback is tested, where the options name none.
DRAFTS = SpeculativeConfig(method="ngram", prompt_lookup_min=1)

Outcome = Literal["caught", "missed", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """`layer`: what the fault is in; `why`: where it was caught, or why it was not planted."""

    name: str
    layer: str
    outcome: Outcome
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestResult:
    """`sound`: the verdict of the control without a fault, `sound_line` its last line; `ops`: the
    op table with the faults; `note` says why, if it is not the one used for serving."""

    ops: str
    sound: Verdict
    sound_line: str
    faults: tuple[FaultResult, ...]
    note: str | None = None

    def named(self, outcome: Outcome) -> tuple[str, ...]:
        return tuple(each.name for each in self.faults if each.outcome == outcome)

    @property
    def verdict(self) -> Verdict:
        """A fault that was missed is a mismatch: of the verifier with what it is for."""
        if self.sound != "PASS":
            return self.sound
        if self.named("missed"):
            return "MISMATCH"
        return "PASS" if self.named("caught") else "NOT SHOWN"

    @property
    def last_line(self) -> str:
        line = f"SELF-TEST {self.verdict}"
        if self.sound != "PASS":
            return f"{line} without any fault: {self.sound_line}"
        missed, skipped = self.named("missed"), self.named("skipped")
        if missed:
            return f"{line} missed={', '.join(missed)}"
        skips = f" skipped={len(skipped)}" if skipped else ""
        return f"{line} caught={len(self.named('caught'))}{skips} ops={self.ops}"


def self_test(options: VerifyOptions, report: ReportProgress) -> SelfTestResult:
    """Runs the verifier without a fault and with each known one. Native kernels with faults are a
    separate build; without it the reference table is used, and `SelfTestResult.note` says so. Steps
    verify drafts where the model has recurrent states. Raises CheckpointError, ConfigError,
    DeviceUnavailableError."""
    config = replace(options.config, spec_prefill=None)  # the faults are those of the model itself
    if config.speculation is not None and config.speculation.has_model:  # it changes no stream
        config = replace(config, speculative_config=None)
    options = replace(options, reference="solo", config=config)
    with checkpoint_of(options) as checkpoint:
        found = _find_faults(options, checkpoint)
        options = replace(options, config=replace(config, ops=found.ops))
        if all(each.absent or each.min_tokens <= LONGEST_SHORT_PROMPT for each in found.faults):
            options = _without_long_prompts(options, checkpoint)
        tested = _Tested(options, checkpoint, found, report)
        sound = tested.play(_SOUND)
        if sound.verdict == "NOT SHOWN" and tested.adds_drafts:
            tested = _Tested(options, checkpoint, found, report, adds_drafts=False)
            sound = tested.play(_SOUND)
        return SelfTestResult(
            ops=found.ops,
            sound=sound.verdict,
            sound_line=sound.last_line,
            faults=tuple(map(tested.outcome, tested.faults())) if sound.passed else (),
            note=found.note,
        )


def _find_faults(options: VerifyOptions, checkpoint: Checkpoint) -> FaultSet:
    config = options.config
    ops = describe_backend(config, checkpoint, options.backends).ops
    backend = find_backend(config.backend, options.backends)
    found = backend.find_faults(ops, checkpoint.config) if checkpoint.is_known else None
    if found is None:
        raise ConfigError(
            f"the {resolve_backend(config.backend, options.backends)} backend has no known faults "
            f"to inject; leave out --self-test"
        )
    return found


def _without_long_prompts(options: VerifyOptions, checkpoint: Checkpoint) -> VerifyOptions:
    context = options.config.max_model_len or min(
        LONGEST_SHORT_PROMPT + options.max_tokens, checkpoint.outline.max_position_embeddings
    )
    return replace(options, config=replace(options.config, max_model_len=context))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Planted:
    """A fault, and how engines get it; `skip` says why they do not. None of the ways: no fault."""

    name: str = "none"
    layer: str = ""
    skip: str | None = None
    load_runner: LoadRunner | None = None
    make_packer: MakePacker = Packer
    spoil_masks: Callable[[CompileConstraint], CompileConstraint] | None = None
    digest_of: DigestOf = image_digest


_SOUND = _Planted()


class _Tested:
    """A model, the workload that it plays, and its faults. `adds_drafts`: steps verify drafts if
    the model has states."""

    def __init__(
        self,
        options: VerifyOptions,
        checkpoint: Checkpoint,
        found: FaultSet,
        report: ReportProgress,
        *,
        adds_drafts: bool = True,
    ) -> None:
        self.has_states = checkpoint.config.recurrence is not None
        self.adds_drafts = adds_drafts and self.has_states and options.config.speculation is None
        if self.adds_drafts:
            config = replace(options.config, speculative_config=DRAFTS)
            options = replace(options, config=config)
        self._options, self._checkpoint = options, checkpoint
        self._found, self._report = found, report
        self._plan, self._workload = prepare_workload(options, checkpoint)
        self._forms = self._workload.forms or make_forms(constraint_compiler(checkpoint))

    def outcome(self, fault: _Planted) -> FaultResult:
        if fault.skip is not None:
            outcome, why = "skipped", fault.skip
        else:
            found = self.play(fault).mismatch
            outcome = "missed" if found is None else "caught"
            why = "" if found is None else f"{found.mode}, request {found.request}"
        return FaultResult(name=fault.name, layer=fault.layer, outcome=outcome, why=why)

    def play(self, fault: _Planted) -> VerifierResult:
        self._report(f"fault: {fault.name}")
        options, plan, workload = self._options, self._plan, self._workload
        checkpoint = self._checkpoint
        if fault.digest_of is not image_digest:
            _, workload = prepare_workload(options, checkpoint, fault.digest_of)
        if fault is _SOUND or fault.spoil_masks is not None:
            workload = self._constrained(workload)
        load = fault.load_runner or self._found.load_sound
        with closing(
            load(self._checkpoint.config, self._checkpoint.weights, self._setup)
        ) as runner:
            runner.warmup()
            compile_constraint = None if workload.forms is None else workload.forms.compile

            def make_core(limits: EngineLimits, core_options: CoreOptions) -> EngineCore:
                compiling = compile_constraint  # a fault of masks is of one engine
                if compiling is not None and fault.spoil_masks is not None:
                    compiling = fault.spoil_masks(compiling)
                parts = EngineParts(compile_constraint=compiling, make_packer=fault.make_packer)
                return core_maker(runner, checkpoint, plan, parts)(limits, core_options)

            verifier = verifier_of(options, plan, workload, make_core)
            return replace(verifier, drafts_show="rejected_drafts").run()

    def _constrained(self, workload: VerifierWorkload) -> VerifierWorkload:
        if self._forms is None or workload.forms is not None:
            return workload
        arrivals = self._forms.constrain(workload.arrivals)
        return replace(workload, arrivals=arrivals, forms=self._forms)

    @property
    def _setup(self) -> RunnerSetup:
        plan = self._plan
        return RunnerSetup(
            limits=plan.limits,
            device=self._options.config.device,
            ops=self._found.ops,
            dtype=plan.dtype,
            quantization=plan.quantization,
            kv_cache_dtype=plan.kv_cache_dtype,
            fill=plan.traits.unwritten_fill,
            num_image_slots=plan.num_image_slots,
        )

    def faults(self) -> Iterator[_Planted]:
        yield from self._of_operations()
        yield from self._of_states()
        if self._workload.images is not None:
            yield from self._of_images()
        yield from self._of_masks()

    def _of_operations(self) -> Iterator[_Planted]:
        longest = max(len(each.request.prompt_token_ids) for each in self._workload.arrivals)
        for each in self._found.faults:
            skip = each.absent
            if skip is None and longest < each.min_tokens:
                skip = f"the longest prompt has {longest} tokens, and it needs {each.min_tokens}"
            yield _Planted(
                name=each.name, layer=each.layer, skip=skip, load_runner=each.load_runner
            )

    def _of_states(self) -> Iterator[_Planted]:
        absent = None if self.has_states else f"the model has no {STATES}"
        undrafted = None
        if self._options.config.speculation is None:
            undrafted = "no draft was rejected; more requests or longer answers may show it"
        for faults, skip in ((STATE_FAULTS, absent), (DRAFT_FAULTS, absent or undrafted)):
            for name, spoil in faults.items():
                pack = partial(FaultyPacker, spoil=spoil)
                yield _Planted(name=name, layer=STATES, skip=skip, make_packer=pack)

    def _of_images(self) -> Iterator[_Planted]:
        has_axes = bool(self._checkpoint.config.rope.axes)
        absent = absent_faults(self._workload.arrivals, has_axes=has_axes)
        for name, fault in IMAGE_FAULTS.items():
            digest_of = digest_without_sides if fault.spoil is None else image_digest
            yield _Planted(
                name=name,
                layer="images",
                skip=absent.get(name),
                make_packer=fault.packer,
                digest_of=digest_of,
            )

    def _of_masks(self) -> Iterator[_Planted]:
        absent = None if self._forms is not None else "the model has no tokenizer"
        for name, spoil in MASK_FAULTS.items():
            yield _Planted(name=name, layer="masks", skip=absent, spoil_masks=spoil)
