"""From a model and options to a verdict: `verify`.

Builds one runner, whose unwritten KV slots hold NaN, and runs every mode on it.
"""

import tempfile
import time
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cadenza.backends import BACKENDS, Backends
from cadenza.backends.base import BackendTraits, Runner
from cadenza.batch.packing import Packer
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import read_shape, write_random_checkpoint
from cadenza.config import EngineConfig, EngineLimits, KVCacheDType, Quantization
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.loop import StepRunner
from cadenza.engine.model_drafter import DraftModel
from cadenza.engine.scoring_steps import PromptScorerModel
from cadenza.engine.step_works import WorkOptions
from cadenza.errors import ConfigError
from cadenza.loading.build import constraint_compiler, find_configured, load_runners, plan_model
from cadenza.loading.engine_plan import EnginePlan, pages_at_once, with_pool
from cadenza.loading.planned_engine import PlannedEngine
from cadenza.models.model_config import window_of
from cadenza.structured import CompileConstraint
from cadenza.verification.faults import MakePacker
from cadenza.verification.modes import ImageSpans
from cadenza.verification.option_matrix import (
    FORM_FIELD,
    Forms,
    MatrixVocabulary,
    OptionMatrix,
    make_forms,
)
from cadenza.verification.play import MakeCore
from cadenza.verification.reference import build_reference
from cadenza.verification.verifier import (
    ReferenceCheck,
    ReferenceKind,
    ReportProgress,
    Verifier,
    VerifierResult,
)
from cadenza.verification.workload import (
    Arrival,
    DigestOf,
    ImageShape,
    WorkloadShape,
    largest_span,
    longest_prompt,
    make_image_workload,
    make_workload,
    with_sparse_prompts,
    without_placeholders,
)
from cadenza.vision.processor import image_digest

RANDOM_SEED = 20

# Fractions of sampled requests: random weights are tested mostly at temperatures around 1.
MODEL_SAMPLED, RANDOM_SAMPLED = 0.5, 0.8


QUANTISED_TOLERANCE: Mapping[Quantization, float] = {"int8": 0.1, "int4": 0.6}
# The largest mean difference of log probabilities (nats) from the reference, by the rounding of
# weights at load and by the type of KV; those of both add up.
KV_TOLERANCE: Mapping[KVCacheDType, float] = {"int8": 0.05}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Of `cadenza verify`. `shape` (random weights) takes precedence over `model`. Each row of a
    `matrix` of sampling options is a request, and `num_requests` is ignored. `config.backend` is
    one of `backends`. `images`: most requests have some."""

    model: str | None = None
    shape: str | None = None
    num_requests: int = 16
    max_tokens: int = 48
    seed: int = 0
    reference: ReferenceKind = "both"
    matrix: OptionMatrix | None = None
    images: bool = False
    config: EngineConfig
    backends: Backends = field(default_factory=lambda: BACKENDS)


def verify(options: VerifyOptions, report: ReportProgress) -> tuple[VerifierResult, EnginePlan]:
    """Also returns the plan of the engine under test. Raises CheckpointError, ConfigError,
    DeviceUnavailableError."""
    with checkpoint_of(options) as checkpoint:
        plan, workload = prepare_workload(options, checkpoint)
        report("loading and compiling")
        engine = PlannedEngine(
            checkpoint=checkpoint, plan=plan, config=options.config, backends=options.backends
        )
        runners = load_runners(engine, fill=plan.traits.unwritten_fill)
        with closing(runners):
            runners.warmup()
            compile_constraint = None if workload.forms is None else workload.forms.compile
            parts = EngineParts(
                compile_constraint=compile_constraint,
                draft=runners.draft,
                scorer=runners.scorer,
                make_packer=_packer_of(runners.scorer, checkpoint),
            )
            make_core = core_maker(runners.target, checkpoint, plan, parts)
            with _reference(options, checkpoint, plan, make_core, compile_constraint) as check:
                verifier = verifier_of(options, plan, workload, make_core)
                return replace(verifier, reference=check, report=report).run(), plan


@contextmanager
def checkpoint_of(options: VerifyOptions) -> Generator[Checkpoint]:
    if options.shape is None:
        yield find_configured(options.model, options.config, options.backends)
        return
    with tempfile.TemporaryDirectory(prefix="cadenza-verify-") as folder:
        shape = read_shape(options.shape)
        dtype = shape.config.dtype
        write_random_checkpoint(shape, Path(folder), seed=RANDOM_SEED, dtype=dtype)
        yield open_checkpoint(Path(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierWorkload:
    """`wanted`: tokens that its longest stream should have; `forms`: those of the matrix, if the
    model has a tokenizer; `images`: their shape, if there are any."""

    arrivals: tuple[Arrival, ...]
    matrix: OptionMatrix | None
    wanted: int
    forms: Forms | None
    images: ImageShape | None


def prepare_workload(
    options: VerifyOptions, checkpoint: Checkpoint, digest_of: DigestOf = image_digest
) -> tuple[EnginePlan, VerifierWorkload]:
    """And a plan whose queue fits all samples and whose pool fits a full batch."""
    plan = _plan(options, checkpoint)
    limits, matrix, forms = plan.limits, options.matrix, None
    wanted = _wanted_length(options, checkpoint, plan.traits)
    shape = WorkloadShape(
        num_requests=options.num_requests if matrix is None else len(matrix.rows),
        rows=limits.max_num_seqs,
        max_tokens=options.max_tokens,
        context=limits.max_model_len,
        vocab_size=checkpoint.outline.vocab_size,
        longest=wanted - options.max_tokens,
        sampled_share=MODEL_SAMPLED if options.shape is None else RANDOM_SAMPLED,
        seed=options.seed,
    )
    arrivals = make_workload(shape)
    if matrix is not None:
        forms = make_forms(constraint_compiler(checkpoint))
        matrix = matrix if forms is not None else matrix.without(FORM_FIELD)
        vocabulary = MatrixVocabulary(
            size=shape.vocab_size,
            eos_token_ids=tuple(checkpoint.eos_token_ids),
            going_on=frozenset() if forms is None else forms.going_on,
        )
        arrivals = matrix.apply(arrivals, vocabulary)
    images = _image_shape(options, checkpoint, limits, digest_of)
    if images is not None:
        make = make_image_workload if options.images else without_placeholders
        arrivals = make(arrivals, images)
    chosen = options.config.sparse_prompts
    if plan.scorer is not None and chosen is not None:
        arrivals = with_sparse_prompts(arrivals, chosen.keep)
    requests = [each.request for each in arrivals]
    limits = replace(limits, max_num_queued_reqs=sum(each.params.n for each in requests))
    plan = with_pool(replace(plan, limits=limits), options.config, pages_at_once(requests, limits))
    return plan, VerifierWorkload(
        arrivals=arrivals,
        matrix=matrix,
        wanted=wanted,
        forms=forms,
        images=images if options.images else None,
    )


def _image_shape(
    options: VerifyOptions, checkpoint: Checkpoint, limits: EngineLimits, digest_of: DigestOf
) -> ImageShape | None:
    """None for a model that does not see. Raises ConfigError if images are asked for then."""
    vision = checkpoint.config.vision if checkpoint.is_known else None
    if vision is None:
        if options.images:
            raise ConfigError(
                "--images: the model takes no images, or --no-images is given; leave out --images, "
                "or name a model that sees, say bundled-vision"
            )
        return None
    return ImageShape(
        processor=vision.processor,
        token_id=vision.image_token_id,
        vocab_size=checkpoint.outline.vocab_size,
        context=limits.max_model_len,
        page_size=limits.page_size,
        seed=options.seed,
        digest_of=digest_of,
    )


def _plan(options: VerifyOptions, checkpoint: Checkpoint) -> EnginePlan:
    plan = plan_model(checkpoint, options.config, options.backends)
    if options.config.max_model_len is not None:
        return plan
    context = min(_wanted_length(options, checkpoint, plan.traits), plan.limits.max_model_len)
    config = replace(options.config, max_model_len=context)
    if plan.rows_reason is not None and config.max_num_seqs is not None:  # said already
        config = replace(config, max_num_seqs=plan.limits.max_num_seqs)
    return plan_model(checkpoint, config, options.backends)


def _wanted_length(options: VerifyOptions, checkpoint: Checkpoint, traits: BackendTraits) -> int:
    longest = longest_prompt(traits.attention_span, checkpoint.outline.windows)
    return longest + options.max_tokens


@contextmanager
def _reference(
    options: VerifyOptions,
    checkpoint: Checkpoint,
    plan: EnginePlan,
    make_core: MakeCore,
    compile_constraint: CompileConstraint | None,
) -> Generator[ReferenceCheck | None]:
    if options.reference == "solo":
        yield None
        return
    engine = build_reference(
        checkpoint,
        options.config,
        max_model_len=plan.limits.max_model_len,
        backends=options.backends,
        compile_constraint=compile_constraint,
    )
    tolerance = KV_TOLERANCE.get(plan.kv_cache_dtype, 0.0)
    if plan.is_quantised:
        # The reference has a checkpoint's own codes; only the activations in int8 differ.
        made = plan.quantization if plan.quantization != "none" else "int8"
        tolerance += QUANTISED_TOLERANCE[made]
    if tolerance:
        yield ReferenceCheck(engine=engine, make_core=make_core, tolerance=tolerance)
        return
    if plan.dtype == "float32":
        yield ReferenceCheck(engine=engine, make_core=make_core)
        return
    config = replace(options.config, dtype="float32", max_model_len=plan.limits.max_model_len)
    wide = plan_model(checkpoint, config, options.backends)
    num_pages = min(plan.limits.num_pages, wide.limits.num_pages)
    wide = replace(wide, limits=replace(plan.limits, num_pages=num_pages))
    planned = PlannedEngine(
        checkpoint=checkpoint, plan=wide, config=config, backends=options.backends
    )
    # Unwritten KV changes every result that depends on it.
    runner = planned.load_warm_runner(fill=wide.traits.unwritten_fill)
    with closing(runner):
        parts = EngineParts(compile_constraint=compile_constraint)
        yield ReferenceCheck(engine=engine, make_core=core_maker(runner, checkpoint, wide, parts))


def verifier_of(
    options: VerifyOptions, plan: EnginePlan, workload: VerifierWorkload, make_core: MakeCore
) -> Verifier:
    spans = None
    if workload.images is not None:
        longest, are_whole = largest_span(workload.images), plan.traits.whole_span > 0
        spans = ImageSpans(longest=longest, are_whole=are_whole)
    return Verifier(
        make_core=make_core,
        limits=plan.limits,
        arrivals=workload.arrivals,
        reference=None,
        with_solo=options.reference != "independent",
        exactness=plan.traits.exactness,
        clock=time.perf_counter,
        coverage=None if workload.matrix is None else workload.matrix.coverage(),
        wanted=workload.wanted,
        speculation=options.config.speculation,
        image_spans=spans,
        has_sparse=any(each.request.sparse_prefill for each in workload.arrivals),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What engines get besides a runner; `draft` in those whose options ask for drafts."""

    compile_constraint: CompileConstraint | None
    draft: DraftModel | None = None
    scorer: PromptScorerModel | None = None
    make_packer: MakePacker = Packer


def _packer_of(scorer: PromptScorerModel | None, checkpoint: Checkpoint) -> MakePacker:
    if scorer is None:
        return Packer
    return partial(Packer, window=window_of(checkpoint.config))


def core_maker(
    runner: Runner, checkpoint: Checkpoint, plan: EnginePlan, parts: EngineParts
) -> MakeCore:
    """With at most the number of pages that `runner` was loaded with."""
    eos = frozenset(checkpoint.eos_token_ids)

    def make_core(limits: EngineLimits, options: CoreOptions) -> EngineCore:
        runner.reset()
        if parts.draft is not None and options.speculation is not None:
            parts.draft.runner.reset()
            options = replace(options, draft_model=parts.draft)
        if parts.scorer is not None:
            parts.scorer.runner.reset()
            options = replace(options, works=WorkOptions(prompt_scorer=parts.scorer))
        num_pages = min(limits.num_pages, plan.limits.num_pages)
        limits = replace(limits, num_pages=num_pages)
        options = replace(options, eos_token_ids=eos, compile_constraint=parts.compile_constraint)
        steps = StepRunner(runner, parts.make_packer(limits, runner.vocab_size))
        return EngineCore(runner, limits, options, steps)

    return make_core
