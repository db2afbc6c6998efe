"""`cadenza info`: what would be loaded, and into how much memory; it reads headers, and the weights
once, for their digest. Invariants: no weight is loaded and nothing is allocated on a device; text
and JSON have the same facts and keys.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.cli.options import EngineFlags, JsonFlag, ModelArgument
from cadenza.cli.report import json_line, picked, sections_text
from cadenza.config import EngineConfig
from cadenza.errors import CheckpointError

if TYPE_CHECKING:
    from cadenza.batch.step_cost import StepCost
    from cadenza.checkpoint.folder import Checkpoint
    from cadenza.loading.engine_plan import EnginePlan
    from cadenza.loading.planned_engine import PlannedEngine
    from cadenza.models.model_config import ModelConfig
    from cadenza.sparse_prefill import SpecPrefillConfig

MeasureFlag = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Load the model and time its steps: what `serve` would choose as --max-itl-ms, and "
        "what that costs.",
    ),
]

# Widths and heights of images whose tokens are shown.
SHOWN_SIZES = ((224, 224), (640, 480), (1920, 1080), (2000, 2000), (5000, 5000))

Facts = Mapping[str, Mapping[str, Any]]  # sections of facts. A key's ending is its unit.


def info(
    model: ModelArgument = None,
    *,
    json: JsonFlag = False,
    measure: MeasureFlag = False,
    config: EngineFlags,
) -> None:
    """Show what would be loaded: model, memory plan, backend, exactness. Allocates nothing, unless
    --measure loads the model to time its steps.

    For a folder that cannot be loaded it shows its config.json, tensors and files, and the reason.
    """
    from cadenza.loading.build import find_configured, plan_model
    from cadenza.server.limits import ServerLimits

    try:
        checkpoint = find_configured(model, config)
    except CheckpointError as error:
        if model is not None and Path(model).is_dir():
            _show_refused(model, str(error), as_json=json)
        raise
    plan = plan_model(checkpoint, config, bodies_bytes=ServerLimits().max_bodies_bytes)
    facts = dict(describe(model, checkpoint, plan, config))
    facts["answers"] = _answers(checkpoint, plan, config)
    if measure:
        facts |= _measured(checkpoint, plan, config)
    print(json_line(facts) if json else sections_text(facts))


def _measured(checkpoint: "Checkpoint", plan: "EnginePlan", config: EngineConfig) -> Facts:
    """What a step costs, and what --max-itl-ms would then be; which kernels were compared at
    loading."""
    from cadenza.backends.base import ProvenRunner
    from cadenza.engine.calibration import make_step_bound, measure_step_cost
    from cadenza.loading.planned_engine import PlannedEngine

    limits, engine = plan.limits, PlannedEngine(checkpoint=checkpoint, plan=plan, config=config)
    runner = engine.load_warm_runner()
    proof = runner.proof if isinstance(runner, ProvenRunner) else None
    try:
        measured = measure_step_cost(runner, limits, time.perf_counter)
        bound = make_step_bound(measured, limits, None)
    finally:
        runner.close()
    cost = bound.cost
    steps = {
        "fixed_ms": cost.fixed_ms,
        "token_ms": cost.token_ms,
        "logit_row_ms": cost.logit_ms,
        "thousand_keys_ms": 1000 * cost.key_ms,
        "default_max_itl_ms": bound.max_ms,
        "prefill_share_under_default": cost.prefill_share(
            bound.max_ms, limits.max_num_batched_tokens
        ),
        # Of a full batch of decodes and the fewest prompt tokens that a step computes.
        "smallest_max_itl_ms_kept": cost.granted_ms(limits.max_num_seqs, 0),
        "context_kept_under_default": min(
            limits.max_model_len, cost.kept_context(bound.max_ms, limits.max_num_seqs)
        ),
    }
    proven = {} if proof is None else {"kernel_proof": asdict(proof)}
    return {"steps": steps, **_measured_gains(engine, measured), **proven}


def _measured_gains(engine: "PlannedEngine", target: "StepCost") -> Facts:
    """As `_sparse_prompts` has them, by steps of the draft model that are measured now."""
    from cadenza.engine.calibration import measure_step_cost
    from cadenza.loading.draft import cost_of_steps, gains_table

    scorer, chosen, limits = engine.load_scorer(), engine.config.sparse_prompts, engine.plan.limits
    if scorer is None or chosen is None:
        return {}
    try:
        scorer.runner.warmup()
        draft = measure_step_cost(scorer.runner, scorer.limits, time.perf_counter)
    finally:
        scorer.runner.close()
    most, keeps = limits.max_num_batched_tokens, _keeps(chosen)
    costs = cost_of_steps(target, most), cost_of_steps(draft, most)
    return {"sparse_prefill_by_steps": gains_table(*costs, keeps, limits.max_model_len)}


def _show_refused(name: str, reason: str, *, as_json: bool) -> None:
    """The survey of a folder that cannot be loaded, before the error that ends the command."""
    from cadenza.checkpoint.opening import survey_folder

    verdict = {"name": name, "is_supported": False, "reason": reason}
    survey = survey_folder(Path(name))
    print(
        json_line({"model": verdict | survey})
        if as_json
        else sections_text({"model": verdict} | survey)
    )


def describe(
    name: str | None, checkpoint: "Checkpoint", plan: "EnginePlan", config: EngineConfig
) -> Facts:
    """All facts but `answers`, under the names of `EngineConfig`'s flags where there are such."""
    limits, traits = plan.limits, plan.traits
    return {
        "model": _model(name, checkpoint),
        "text": _text(checkpoint, config),
        "memory": {
            **picked(plan, "available_bytes", "headroom_bytes", "weight_bytes", "kv_bytes"),
            **picked(plan, "scratch_bytes"),
            **picked(plan.footprint, "process_bytes", "front_end_bytes", "bodies_bytes"),
            **_states(plan),
            **(picked(plan, "image_bytes") if plan.image_bytes else {}),
            "planned_bytes": plan.planned_bytes,
            "resident_at_start_bytes": plan.start_bytes,
            **picked(plan, "reserved_bytes", "kv_bytes_per_token", "kv_layout"),
            **picked(limits, "page_size", "num_pages", "max_model_len"),
            # A request's last token is never computed and needs no KV.
            "num_full_length_requests": limits.num_pages
            // max(1, -(-(limits.max_model_len - 1) // limits.page_size)),
        },
        "engine": {
            "backend": traits.name,
            "device": config.device,
            **picked(traits, "ops", "exactness"),
            **picked(plan, "dtype", "quantization"),
            "activations": _activations(plan),
            "kv_cache_dtype": plan.kv_cache_dtype,
            "arithmetic": config.arithmetic,
            **({} if traits.kernels_note is None else {"kernels_note": traits.kernels_note}),
            **({} if traits.tile_rows is None else {"tile_rows": traits.tile_rows}),
            "max_num_seqs": limits.max_num_seqs,
            "max_num_seqs_reason": plan.rows_reason or "as given",
            **picked(limits, "max_num_batched_tokens"),
            **picked(limits, "max_num_queued_reqs", "max_num_queued_tokens"),
            **picked(config, "scheduler", "max_itl_ms", "batching", "scheduling_policy"),
            "admission": config.admission,
            "enable_prefix_caching": limits.enable_prefix_caching,
            "prefix_cache_share": limits.prefix_cache_memory_share,
            "seed": config.seed,
        },
        **_images(checkpoint, plan, config),
        **_page_folder(config),
        **_speculation(plan, config),
        **_sparse_prompts(checkpoint, plan, config),
    }


def _images(checkpoint: "Checkpoint", plan: "EnginePlan", config: EngineConfig) -> Facts:
    from cadenza.media.image_input import MAX_ENCODED_BYTES, MAX_IMAGES, MAX_PIXELS

    vision = checkpoint.config.vision if checkpoint.is_known else None
    if vision is None:
        return {}
    plans = {size: vision.processor.plan(*size) for size in SHOWN_SIZES}
    return {
        "images": {
            "formats": "JPEG, PNG, WebP, GIF",
            "max_images": MAX_IMAGES,
            "max_file_bytes": MAX_ENCODED_BYTES,
            "max_pixels": MAX_PIXELS,
            **picked(config, "image_max_tokens", "image_cache_bytes"),
            **picked(plan, "num_image_slots"),
            **{
                f"tokens_of_{width}x{height}": each.num_tokens
                for (width, height), each in plans.items()
            },
        }
    }


def _states(plan: "EnginePlan") -> dict[str, int]:
    """Of a model with recurrent state: its slots, and how many are snapshots at least."""
    from cadenza.loading.space import SLOTS_PER_ROW

    limits, state_bytes = plan.limits, plan.state_bytes_per_slot
    if not limits.num_state_slots:
        return {}
    num_row_slots = SLOTS_PER_ROW * limits.max_num_seqs
    return {
        "state_bytes": plan.state_bytes,
        "state_bytes_per_slot": state_bytes,
        "row_state_bytes": num_row_slots * state_bytes,
        "snapshot_bytes": (limits.num_state_slots - num_row_slots) * state_bytes,
        "num_state_slots": limits.num_state_slots,
        "state_snapshot_interval": limits.state_snapshot_interval,
    }


def _page_folder(config: EngineConfig) -> Facts:
    """The folder of stored prefixes, where the options name one, and the bytes that it may take."""
    if config.prefix_cache_disk is None:
        return {}
    from cadenza.loading.planned_engine import max_folder_bytes

    return {
        "stored_prefixes": {
            "prefix_cache_disk": config.prefix_cache_disk,
            "prefix_cache_disk_bytes": max_folder_bytes(config),
        }
    }


def _speculation(plan: "EnginePlan", config: EngineConfig) -> Facts:
    """How drafts are made, where the options ask for any."""
    chosen, draft = config.speculation, plan.draft
    if chosen is None:
        return {}
    facts: dict[str, Any] = {
        "method": chosen.method,
        "num_speculative_tokens": chosen.num_speculative_tokens,
    }
    if draft is not None:
        facts |= {
            "draft_model": draft.name,
            "draft_dtype": draft.dtype,
            "draft_quantization": draft.quantization,
            "draft_context": min(draft.context, plan.limits.max_model_len),
            "draft_weight_bytes": draft.weight_bytes,
            "draft_kv_bytes": plan.kv_bytes_beside(draft),
        }
    return {"speculation": facts}


def _sparse_prompts(checkpoint: "Checkpoint", plan: "EnginePlan", config: EngineConfig) -> Facts:
    """How prompts are pruned, where the options ask for it, and how much sooner their first tokens
    are predicted to come, by the shapes of the two models."""
    from cadenza.loading.draft import cost_of_shape, gains_table

    chosen, scorer = config.sparse_prompts, plan.scorer
    if chosen is None or scorer is None:
        return {}
    costs = cost_of_shape(checkpoint.config), cost_of_shape(scorer.checkpoint.config)
    context = plan.scorer_limits.max_model_len
    return {
        "sparse_prefill": {
            "draft_model": scorer.name,
            **picked(chosen, "keep", "threshold", "head", "when", "allow_request"),
            "draft_dtype": scorer.dtype,
            "draft_quantization": scorer.quantization,
            "draft_context": context,
            "draft_weight_bytes": scorer.weight_bytes,
            "draft_kv_bytes": plan.kv_bytes_beside(scorer),
            **gains_table(*costs, _keeps(chosen), plan.limits.max_model_len),
        }
    }


def _keeps(chosen: "SpecPrefillConfig") -> tuple[float, ...]:
    from cadenza.loading.draft import SHOWN_KEEPS

    return tuple(dict.fromkeys((chosen.keep, *SHOWN_KEEPS)))


def _answers(checkpoint: "Checkpoint", plan: "EnginePlan", config: EngineConfig) -> dict[str, Any]:
    from cadenza.frontend.loaded_model import open_text
    from cadenza.loading.planned_engine import PlannedEngine

    text = open_text(checkpoint, config, plan)
    engine = PlannedEngine(checkpoint=checkpoint, plan=plan, config=config)
    fingerprint = text.with_forms(engine.identity().fingerprint)
    return {"system_fingerprint": fingerprint.digest, **fingerprint.parts}


def _activations(plan: "EnginePlan") -> str:
    """The type in which activations are multiplied with the weights. A backend that brings its
    models' arithmetic states their memory, and rounds no activations."""
    rounds = plan.is_quantised and plan.traits.memory is None
    return "int8 per token and group of 32, 16 bits in one of 64" if rounds else plan.dtype


def _model(name: str | None, checkpoint: "Checkpoint") -> dict[str, Any]:
    """Of a model whose arithmetic the backend brings only what its outline says."""
    from cadenza.models.declaration import count_parameters

    outline = checkpoint.outline
    facts = {
        "name": name or "bundled",
        "revision": checkpoint.revision,
        "is_supported": True,
        "format": checkpoint.format,
        "files": _files(checkpoint),
        "family": outline.family,
    }
    end = {"eos_token_ids": checkpoint.eos_token_ids}
    if not checkpoint.is_known:
        sizes = picked(outline, "vocab_size", "max_position_embeddings")
        return {**facts, "stored_dtype": outline.dtype, **sizes, **end}
    shape, weights = checkpoint.config, checkpoint.weights
    return {
        **facts,
        "num_parameters": count_parameters(shape),
        "stored_dtype": shape.dtype,
        "stored_types": dict(Counter(sorted(weights.stored_type(name) for name in weights))),
        **_scheme(checkpoint),
        **picked(shape, "num_layers", "hidden_size", "intermediate_size"),
        **_experts(shape),
        **picked(shape, "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
        **picked(shape, "max_position_embeddings", "tie_word_embeddings"),
        "can_generate": checkpoint.can_generate,
        "has_score_head": checkpoint.score_head is not None,
        **end,
    }


def _scheme(checkpoint: "Checkpoint") -> dict[str, str | None]:
    """How the stored weights are quantised, and the rounding of activations that they ask for."""
    scheme = checkpoint.scheme
    return {
        "stored_quantization": scheme and scheme.name,
        "stated_activations": scheme and scheme.activations,
    }


def _files(checkpoint: "Checkpoint") -> dict[str, int]:
    """Name to size in bytes: of a folder's files, or of those of a GGUF model."""
    from cadenza.checkpoint.opening import list_files

    if checkpoint.format == "gguf":
        return {file.name: len(file.data) for file in checkpoint.weights.files}
    return list_files(checkpoint.folder)


def _experts(shape: "ModelConfig") -> dict[str, int | None]:
    """All null for a model without experts."""
    experts = shape.experts
    return {
        "num_experts": experts and experts.num_experts,
        "num_experts_per_token": experts and experts.num_chosen,
        "expert_intermediate_size": experts and experts.intermediate_size,
        "num_expert_layers": experts and sum(kind.has_experts for kind in shape.layer_kinds),
    }


def _text(checkpoint: "Checkpoint", config: EngineConfig) -> dict[str, Any]:
    """The tokenizer, the template, and the recommended sampling if it is followed."""
    from cadenza.frontend.sampling_defaults import DESCRIBED
    from cadenza.text import Tokenizer

    source = checkpoint.tokenizer_source
    defaults = checkpoint.generation_defaults
    is_followed = config.generation_config == "auto"
    recommended = {name: getattr(defaults, name) for name in DESCRIBED}
    return {
        "tokenizer": None if source is None else source.name,
        "tokenizer_vocab_size": None if source is None else Tokenizer(source).vocab_size,
        "has_chat_template": checkpoint.chat_template is not None,
        "generation_defaults": {
            key: value for key, value in recommended.items() if is_followed and value is not None
        },
        "assumed_defaults": defaults.assumed if is_followed else (),
        "not_applied": defaults.unapplied if is_followed else (),
    }
