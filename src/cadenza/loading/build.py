"""Builds a warm engine from a model's name and options. `find_backend` imports the configured
backend on first use, so that importing this module is cheap."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cadenza.backends import BACKENDS, Backends, find_backend, uses_own_model_code
from cadenza.backends.base import BackendTraits, Runner
from cadenza.batch.image_cost import ImageCost
from cadenza.batch.step_cost import MIN_PROMPT_TOKENS, StepBound, StepCost, StepLoad, last_granted
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.hub import Hub, is_hub_id
from cadenza.checkpoint.opening import open_bundled_draft, open_checkpoint
from cadenza.checkpoint.tokenizer_files import given_template
from cadenza.config import EngineConfig, EngineLimits, MaxItlMs
from cadenza.engine.calibration import make_step_bound, measure_image_cost
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.model_drafter import DraftModel
from cadenza.engine.page_folder import PageFolder
from cadenza.engine.scoring_steps import PromptScorerModel
from cadenza.engine.step_works import WorkOptions
from cadenza.errors import CheckpointError, ConfigError, show
from cadenza.loading.draft import (
    check_target,
    plan_copy,
    plan_draft_model,
    plan_mtp_head,
    plan_scorer,
)
from cadenza.loading.engine_plan import DraftPlan, EnginePlan, ExtraMemory
from cadenza.loading.footprint import front_end_bytes_of, usual_part
from cadenza.loading.memory import (
    HOST_MEMORY,
    HostMemory,
    MemoryReservation,
    find_reserved,
    record_reservation,
)
from cadenza.loading.plan import device_share, make_plan
from cadenza.loading.planned_engine import PlannedEngine, cache_folder
from cadenza.loading.step_costs import StepCosts, open_step_costs
from cadenza.models.model_config import window_of
from cadenza.models.towers.reader import VisionOptions
from cadenza.scheduler.admission import RESERVED_OUTPUT
from cadenza.scheduler.turns import POLICIES
from cadenza.text.constraints.token_constraint import ConstraintCompiler
from cadenza.text.tokens.tokenizer import TokenizerSource

logger = logging.getLogger(__name__)

# Called with "load" when the weights are loaded, and "compile" when all programs are compiled
OnPhaseDone = Callable[[str], None]


def find_configured(
    model: str | Path | None, config: EngineConfig, backends: Backends = BACKENDS
) -> Checkpoint:
    """`find_checkpoint` for the configured backend, with the configured chat template. Raises also
    ConfigError if there is no such backend."""
    # A wrong name is refused before a download.
    any_family = uses_own_model_code(config.backend, backends)
    vision = VisionOptions(
        has_images=config.images and not any_family,
        projector=None if config.mmproj is None else Path(config.mmproj),
        max_tokens=config.image_max_tokens,
    )
    checkpoint = find_checkpoint(
        model, revision=config.revision, any_family=any_family, vision=vision
    )
    if config.chat_template is None:
        return checkpoint
    templates: dict[str, str] = {}
    if config.chat_template != "none":
        templates["default"] = given_template(config.chat_template)
    return replace(checkpoint, tokenizer=replace(checkpoint.tokenizer, chat_templates=templates))


def find_checkpoint(
    model: str | Path | None,
    *,
    revision: str | None = None,
    hub: Hub | None = None,
    any_family: bool = False,
    vision: VisionOptions | None = None,
) -> Checkpoint:
    """Opens a model folder or GGUF file, or downloads `owner/model` from the hub, or one of its
    GGUF files for `owner/model:Q4_K_M`; None is the bundled model. An existing folder takes
    precedence over a hub model of the same name. Raises CheckpointError if there is no such model
    or it is not supported, ConfigError for a `revision` of a model that is not from the hub."""
    is_local = model is None or _exists(model) or isinstance(model, Path)
    if not is_local and is_hub_id(str(model)):
        has_images = vision is None or vision.has_images
        hub = hub or Hub(any_family=any_family, has_images=has_images)
        snapshot = hub.fetch(str(model), revision)
        return open_checkpoint(
            snapshot.path, revision=snapshot.commit, any_family=any_family, vision=vision
        )
    if revision is not None:
        raise ConfigError(
            f"--revision {revision} names a commit of a hub model; "
            f"{model or 'the bundled model'} is not one: leave it out"
        )
    path = None if model is None else Path(model)
    return open_checkpoint(path, any_family=any_family, vision=vision)


def _exists(name: object) -> bool:
    """Raises CheckpointError if `name` is not a valid path."""
    if not isinstance(name, str | Path) or not str(name):
        raise CheckpointError(
            f"the model is {show(name)}; name a folder, a GGUF file, or a hub model as owner/model"
        )
    try:
        return Path(name).exists()
    except (OSError, ValueError) as error:  # such as a name that is too long, or no permission
        raise CheckpointError(
            f"the model {show(name)} is not a valid path; name a folder, or a hub model as "
            f"owner/model"
        ) from error


def describe_backend(
    config: EngineConfig, checkpoint: Checkpoint, backends: Backends = BACKENDS
) -> BackendTraits:
    """Raises as `Backend.describe`."""
    backend = find_backend(config.backend, backends)
    if config.gpu_memory_utilization is not None:
        backend.reserve_memory(config.gpu_memory_utilization)
    return backend.describe(config.device, config.ops, checkpoint)


def plan_model(
    checkpoint: Checkpoint,
    config: EngineConfig,
    backends: Backends = BACKENDS,
    memory: HostMemory = HOST_MEMORY,
    bodies_bytes: int = 0,
) -> EnginePlan:
    """The plan for the memory that is available now, for a server that reads at most `bodies_bytes`
    of request bodies at a time. Allocates nothing. Raises ConfigError if the options are invalid
    for the backend or the model does not fit, DeviceUnavailableError."""
    traits = describe_backend(config, checkpoint, backends)
    shared = device_share(config, traits)
    if shared is not None:
        available = shared * (config.tensor_parallel_size or 1)
    else:  # what the processes have taken already is part of the plan
        reserved = find_reserved(cache_folder() / "engines", memory.root)
        beside_others = memory.available_beside(
            reserved_bytes=reserved.in_all, in_group_bytes=reserved.in_group
        )
        available = beside_others + memory.taken_bytes(
            process_bytes=traits.process_bytes, front_end_bytes=front_end_bytes_of(checkpoint)
        )
        if memory.most_bytes is not None:
            available = min(available, memory.most_bytes)
    draft = _plan_draft(checkpoint, config, traits, backends)
    scorer = _plan_scorer(checkpoint, config, traits, backends)
    extra = ExtraMemory(draft=draft, scorer=scorer, bodies_bytes=bodies_bytes)
    plan = make_plan(config, checkpoint, traits, available, extra)
    num_rows, asked = plan.limits.max_num_seqs, config.max_num_seqs
    if asked is not None and num_rows < asked:
        logger.warning(
            "--max-num-seqs %d: %d rows run, %s; further requests wait",
            asked,
            num_rows,
            plan.rows_reason,
        )
    return plan


def _plan_draft(
    checkpoint: Checkpoint, config: EngineConfig, traits: BackendTraits, backends: Backends
) -> DraftPlan | None:
    speculation = config.speculation
    if speculation is None or not speculation.has_model or "drafts" not in traits.capabilities:
        return None
    if speculation.method == "quantised":
        return plan_copy(checkpoint, config, traits)
    if speculation.method == "mtp":
        return plan_mtp_head(checkpoint, config, traits)
    draft = _find_second(checkpoint, speculation.model, "--speculative-config")
    return plan_draft_model(checkpoint, draft, config, describe_backend(config, draft, backends))


def _plan_scorer(
    checkpoint: Checkpoint, config: EngineConfig, traits: BackendTraits, backends: Backends
) -> DraftPlan | None:
    chosen = config.sparse_prompts
    if chosen is None:
        return None
    check_target(checkpoint, traits)
    if not chosen.has_model:
        return None
    scorer = _find_second(checkpoint, chosen.model, "--spec-prefill")
    return plan_scorer(checkpoint, scorer, config, describe_backend(config, scorer, backends))


def _find_second(checkpoint: Checkpoint, model: str | None, flag: str) -> Checkpoint:
    """The model that a flag names; None is the package's draft of the bundled model."""
    try:
        if model is None:
            return open_bundled_draft(checkpoint)
        return find_checkpoint(model, vision=VisionOptions(has_images=False))
    except CheckpointError as error:
        raise CheckpointError(f"the draft model of {flag}: {error}") from error


def open_planned(
    model: str | Path | None,
    config: EngineConfig,
    backends: Backends = BACKENDS,
    memory: HostMemory = HOST_MEMORY,
    bodies_bytes: int = 0,
) -> PlannedEngine:
    """Opens the checkpoint and plans for it; loads no weights. `config.backend` is in `backends`.
    Raises as `find_checkpoint` and `plan_model`."""
    checkpoint = find_configured(model, config, backends)
    plan = plan_model(checkpoint, config, backends, memory, bodies_bytes)
    return PlannedEngine(checkpoint=checkpoint, plan=plan, config=config, backends=backends)


def build_core(engine: PlannedEngine, on_phase_done: OnPhaseDone = lambda _: None) -> EngineCore:
    """Loads the weights and compiles all programs of a plan."""
    runners = load_warm_runners(engine, on_phase_done)
    return make_core(engine, runners, constraint_compiler(engine.checkpoint))


def build_serving_core(
    engine: PlannedEngine,
    on_phase_done: OnPhaseDone = lambda _: None,
    prefix_secret: bytes | None = None,
) -> EngineCore:
    """As `build_core`; also loads what structured outputs need, so that the first of them does not
    delay other requests. `prefix_secret`: as `CoreOptions.secret`."""
    constraints = constraint_compiler(engine.checkpoint)
    if constraints is not None:
        constraints.start_loading()
    runners = load_warm_runners(engine, on_phase_done)
    if constraints is not None and not constraints.has_loaded():
        constraints = None
    return make_core(engine, runners, constraints, prefix_secret)


@dataclass(frozen=True, slots=True)
class Runners:
    """The runners of a model, of its draft model and of its prompt scorer; the cost of their steps
    is known once they are warm."""

    target: Runner
    draft: DraftModel | None
    scorer: PromptScorerModel | None = None
    pages: PageFolder | None = None
    costs: StepCosts | None = None

    def warmup(self) -> None:
        self.target.warmup()
        if self.draft is not None:
            self.draft.runner.warmup()
        if self.scorer is not None:
            self.scorer.runner.warmup()

    def close(self) -> None:
        if self.draft is not None:
            self.draft.runner.close()
        if self.scorer is not None:
            self.scorer.runner.close()
        self.target.close()


def load_runners(engine: PlannedEngine, *, fill: float | None = None) -> Runners:
    """Loads the weights and compiles nothing; KV slots start as `fill`, or unwritten."""
    target = engine.load_runner(fill=fill)
    draft = engine.load_draft(target, fill=fill)
    return Runners(target, draft, engine.load_scorer(fill=fill))


def load_warm_runners(engine: PlannedEngine, on_phase_done: OnPhaseDone) -> Runners:
    plan = engine.plan
    logger.info("%s", plan.summary)
    if plan.traits.kernels_note is not None:
        logger.info("%s", plan.traits.kernels_note)
    logger.debug("resolved configuration: %s", plan)
    pages, costs = engine.open_page_folder(), open_step_costs(engine)
    runners = replace(load_runners(engine), pages=pages, costs=costs)
    others = [each.checkpoint for each in (plan.draft, plan.scorer) if each is not None]
    for each in (engine.checkpoint, *others):
        if each.is_known:  # leaves their files to the page cache
            each.weights.release_pages()
    on_phase_done("load")
    runners.warmup()
    on_phase_done("compile")
    return runners


def reserve_planned(plan: EnginePlan) -> MemoryReservation:
    """Records how much host memory the engine of `plan` will take, for other engines."""
    if plan.traits.device_memory_bytes is not None:
        return MemoryReservation()
    footprint = plan.footprint
    in_front = footprint.front_end_bytes + footprint.bodies_bytes
    return record_reservation(cache_folder() / "engines", plan.planned_bytes - in_front)


def release_tokenizer(checkpoint: Checkpoint) -> None:
    """Frees what was made of a tokenizer that is not a file of its own, once all have read it."""
    source = checkpoint.tokenizer_source
    if isinstance(source, TokenizerSource):
        source.release()


def make_core(
    engine: PlannedEngine,
    runners: Runners,
    constraints: ConstraintCompiler | None,
    prefix_secret: bytes | None = None,
) -> EngineCore:
    """The engine over warm runners; without `constraints` it refuses structured outputs."""
    config, limits = engine.config, engine.plan.limits
    runner, costs = runners.target, runners.costs
    assert costs is not None, "the runners are warm"
    step_cost = step_bound = None
    if config.max_itl_ms != "none":
        step_bound = _step_bound(costs.of("target", runner, limits), limits, config.max_itl_ms)
    elif config.speculation is not None:
        step_cost = costs.of("target", runner, limits)
    options = CoreOptions(
        eos_token_ids=frozenset(engine.checkpoint.eos_token_ids),
        loop=config.scheduler,
        seed=config.seed,
        reserved_output=RESERVED_OUTPUT[config.admission],
        policy=POLICIES[config.scheduling_policy](config.starvation_guard),
        batching=config.batching,
        step_bound=step_bound,
        step_cost=step_cost,
        speculation=config.speculation,
        draft_model=None if runners.draft is None else _measured(runners.draft, costs),
        compile_constraint=None if constraints is None else constraints.compile,
        page_folder=runners.pages,
        secret=prefix_secret,
        works=WorkOptions(
            image_cost=None if step_bound is None else _image_cost(engine, runner),
            prompt_scorer=_with_cost(runners.scorer, None if step_bound is None else costs),
        ),
        window=None if config.sparse_prompts is None else window_of(engine.checkpoint.config),
    )
    return EngineCore(runner, limits, options)


def _image_cost(engine: PlannedEngine, runner: Runner) -> ImageCost | None:
    """Measured now; None where no images are encoded."""
    limits = engine.plan.limits
    if limits.images is None:
        return None
    vision = engine.checkpoint.config.vision
    assert vision is not None, "the model sees"
    cost = measure_image_cost(runner, limits, usual_part(vision), time.perf_counter)
    logger.info("images are encoded at %.0f GFLOP/s", 1e-6 / cost.product_ms)
    return cost


def _measured(draft: DraftModel, costs: StepCosts) -> DraftModel:
    cost = costs.of("draft", draft.runner, draft.limits)
    load = StepLoad(num_tokens=1, num_logits=1, num_keys=1)
    logger.info("a draft of one stream takes %.1f ms", cost.predict_ms(load))
    return replace(draft, cost=cost)


def _with_cost(
    scorer: PromptScorerModel | None, costs: StepCosts | None
) -> PromptScorerModel | None:
    if scorer is None or costs is None:
        return scorer
    cost = costs.of("scorer", scorer.runner, scorer.limits)
    logger.info("a token of a prompt is scored in %.3f ms", cost.token_ms)
    return replace(scorer, cost=cost)


def constraint_compiler(checkpoint: Checkpoint) -> ConstraintCompiler | None:
    """The compiler of structured outputs over the checkpoint's tokenizer; None without one."""
    source = checkpoint.tokenizer_source
    if source is None:
        return None
    return ConstraintCompiler(
        source,
        vocab_size=checkpoint.outline.vocab_size,
        eos_token_ids=checkpoint.eos_token_ids,
    )


def _step_bound(cost: StepCost, limits: EngineLimits, max_itl_ms: MaxItlMs) -> StepBound:
    given = None if max_itl_ms == "auto" else float(max_itl_ms)
    bound = make_step_bound(cost, limits, given)
    num_tokens = limits.max_num_batched_tokens
    share = bound.cost.prefill_share(bound.max_ms, num_tokens)
    logger.info(
        "steps take at most %.0f ms (--max-itl-ms): prompts are computed at %.0f %% of the rate of "
        "steps with %d tokens",
        bound.max_ms,
        100 * share,
        num_tokens,
    )
    num_rows, last = limits.max_num_seqs, last_granted(limits.max_model_len)
    num_kept = bound.cost.kept_context(bound.max_ms, num_rows)
    if num_kept < last + MIN_PROMPT_TOKENS:
        logger.warning(
            "--max-itl-ms %.0f cannot be kept beside %d decoding requests%s: a step with %d prompt "
            "tokens takes up to %.0f ms; raise it or lower --max-num-seqs",
            bound.max_ms,
            num_rows,
            f" behind token {num_kept} of a prompt" if num_kept else "",
            MIN_PROMPT_TOKENS,
            bound.cost.granted_ms(num_rows, last),
        )
    return bound
