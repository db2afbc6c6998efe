"""`cadenza info`: what would be loaded, and into how much memory.

Owns the list of facts and its two forms. Reads a folder's small files and the headers of its
weights; no weight is read and nothing is allocated on a device. Invariant: text and JSON are made
of the same facts.
"""

import json as json_library
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.cli.options import JsonFlag, ModelFlag
from cadenza.cli.prompts import only_model
from cadenza.config import EngineConfig
from cadenza.errors import CheckpointError

if TYPE_CHECKING:
    from cadenza.checkpoint import Checkpoint, ModelConfig
    from cadenza.loading.plan import EnginePlan

Folder = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="A model's folder or hub id; without, the bundled one.",
    ),
]

Facts = dict[str, dict[str, Any]]
"""Sections of facts, as JSON has them. A key's ending is its unit."""


def info(
    folder: Folder = None,
    *,
    model: ModelFlag = None,
    json: JsonFlag = False,
    config: EngineConfig,
) -> None:
    """Show what would be loaded: model, memory plan, backend, exactness. Allocates nothing.

    Of a folder that cannot be loaded it shows what the folder says of itself, and why not.
    """
    name = only_model(folder, model)
    from cadenza.loading.build import find_checkpoint, plan_model

    try:
        checkpoint = find_checkpoint(name, revision=config.revision)
    except CheckpointError as error:
        _show_refused(name, str(error), json)
        raise
    facts = describe(name, checkpoint, plan_model(checkpoint, config), config)
    print(json_library.dumps(facts, allow_nan=False) if json else as_text(facts))


def _show_refused(name: str | None, reason: str, json: bool) -> None:
    """What a local folder says of itself, before the error that ends the command."""
    if name is None or not Path(name).is_dir():
        return
    from cadenza.checkpoint.survey import survey_folder

    survey = survey_folder(Path(name))
    if json:
        print(
            json_library.dumps(
                {"model": {"name": name, "is_supported": False, "reason": reason, **survey}},
                allow_nan=False,
            )
        )
        return
    print("Model (not supported)")
    for title, facts in survey.items():
        for key, value in facts.items():
            print(f"  {title:<8} {key:<24} {value}")
    print(f"  why not  {reason}")


def describe(
    name: str | None, checkpoint: "Checkpoint", plan: "EnginePlan", config: EngineConfig
) -> Facts:
    """All facts, under the names of `EngineConfig`'s flags where there are such."""
    from cadenza.checkpoint.survey import list_files

    return {
        "model": {
            "name": name or "bundled",
            "revision": checkpoint.revision,
            "is_supported": True,
            "files": list_files(checkpoint.folder),
            **_model(checkpoint),
        },
        "text": _text(checkpoint, config),
        "memory": _memory(plan, config),
        "engine": {
            "backend": plan.traits.name,
            "device": config.device,
            "ops": plan.traits.ops,
            "exactness": plan.traits.exactness,
            "dtype": plan.dtype,
            "max_num_seqs": plan.limits.max_num_seqs,
            "max_num_batched_tokens": plan.limits.max_num_batched_tokens,
            "max_num_queued_reqs": plan.limits.max_num_queued_reqs,
            "scheduler": config.scheduler,
            "enable_prefix_caching": plan.limits.enable_prefix_caching,
            "seed": config.seed,
        },
    }


def _model(checkpoint: "Checkpoint") -> dict[str, Any]:
    from cadenza.checkpoint import count_parameters

    shape = checkpoint.config
    return {
        "family": shape.family,
        "num_parameters": count_parameters(shape),
        "stored_dtype": shape.dtype,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        **_experts(shape),
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "eos_token_ids": checkpoint.eos_token_ids,
    }


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
    """What the folder says of texts; the model's own recommendation where a value is not None."""
    from cadenza.text import Tokenizer

    path = checkpoint.tokenizer_path
    defaults = checkpoint.generation_defaults
    is_followed = config.generation_config == "auto"
    template = checkpoint.chat_template
    return {
        "tokenizer": None if path is None else path.name,
        "tokenizer_vocab_size": None if path is None else Tokenizer(path).vocab_size,
        "has_chat_template": template is not None,
        "generation_defaults": {
            key: value
            for key in ("temperature", "top_k", "top_p", "min_p")
            if is_followed and (value := getattr(defaults, key)) is not None
        },
        "not_applied": defaults.unapplied if is_followed else (),
    }


def _memory(plan: "EnginePlan", config: EngineConfig) -> dict[str, Any]:
    limits = plan.limits
    # A request's last token is never computed and needs no KV.
    pages_of_longest = max(1, -(-(limits.max_model_len - 1) // limits.page_size))
    return {
        "available_bytes": plan.available_bytes,
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": plan.kv_bytes,
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "kv_layout": config.kv_layout,
        "page_size": limits.page_size,
        "num_pages": limits.num_pages,
        "max_model_len": limits.max_model_len,
        "num_full_length_requests": limits.num_pages // pages_of_longest,
    }


def as_text(facts: Facts) -> str:
    """The facts in short lines for people."""
    width = max(len(label) for _, rows in _sections(facts) for label, _ in rows)
    parts: list[str] = []
    for title, rows in _sections(facts):
        parts += [title, *(f"  {label:<{width}}  {value}" for label, value in rows), ""]
    return "\n".join(parts).rstrip()


def _sections(facts: Facts) -> list[tuple[str, list[tuple[str, str]]]]:
    return [
        ("Model", _model_rows(facts["model"], facts["text"])),
        ("Memory", _memory_rows(facts["memory"], facts["engine"])),
        ("Engine", _engine_rows(facts["engine"])),
    ]


def _model_rows(model: dict[str, Any], text: dict[str, Any]) -> list[tuple[str, str]]:
    shape = (
        f"{model['num_layers']} layers, width {model['hidden_size']}, "
        f"MLP {model['intermediate_size']}, {model['num_heads']} heads "
        f"({model['num_kv_heads']} for KV) of {model['head_dim']}"
    )
    tied = ", head tied to the embedding" if model["tie_word_embeddings"] else ""
    tokenizer = f"{text['tokenizer']}, {text['tokenizer_vocab_size']} entries"
    defaults = ", ".join(f"{key} {value:g}" for key, value in text["generation_defaults"].items())
    return [
        ("model", str(model["name"])),
        ("revision", str(model["revision"] or "none: a local folder")),
        ("files", f"{len(model['files'])}, {sum(model['files'].values()):,} bytes"),
        ("family", str(model["family"])),
        ("parameters", f"{model['num_parameters']:,} ({model['stored_dtype']})"),
        ("shape", shape),
        ("experts", _experts_text(model)),
        ("vocabulary", f"{model['vocab_size']}{tied}"),
        ("trained context", f"{model['max_position_embeddings']} tokens"),
        ("tokenizer", "none: token ids only" if text["tokenizer"] is None else tokenizer),
        ("chat template", "yes" if text["has_chat_template"] else "none"),
        ("end of sequence", ", ".join(map(str, model["eos_token_ids"])) or "none"),
        ("sampling defaults", defaults or "none: temperature 1"),
        ("not applied", ", ".join(text["not_applied"]) or "nothing"),
    ]


def _experts_text(model: dict[str, Any]) -> str:
    if model["num_experts"] is None:
        return "none: one MLP a layer"
    return (
        f"{model['num_experts']} of MLP {model['expert_intermediate_size']} in "
        f"{model['num_expert_layers']} layers, {model['num_experts_per_token']} for each token"
    )


def _memory_rows(memory: dict[str, Any], engine: dict[str, Any]) -> list[tuple[str, str]]:
    from cadenza.cli.words import bytes_text, counted

    tokens = memory["num_pages"] * memory["page_size"]
    pages = (
        f"{counted(memory['num_pages'], 'page')} × {memory['page_size']} tokens × "
        f"{bytes_text(memory['kv_bytes_per_token'])} = {bytes_text(memory['kv_bytes'])}"
    )
    return [
        ("available", bytes_text(memory["available_bytes"])),
        ("weights", f"{bytes_text(memory['weight_bytes'])} as {engine['dtype']}"),
        ("KV pool", f"{pages} ({memory['kv_layout']})"),
        ("KV tokens", f"{tokens:,}"),
        ("max context", f"{memory['max_model_len']} tokens a request"),
        ("full-length fit", counted(memory["num_full_length_requests"], "request")),
    ]


def _engine_rows(engine: dict[str, Any]) -> list[tuple[str, str]]:
    is_cached = engine["enable_prefix_caching"]
    return [
        ("backend", f"{engine['backend']} (--device {engine['device']})"),
        ("op table", str(engine["ops"])),
        ("exactness", str(engine["exactness"])),
        ("rows", str(engine["max_num_seqs"])),
        ("tokens a step", str(engine["max_num_batched_tokens"])),
        ("may wait", f"{engine['max_num_queued_reqs']} requests"),
        ("scheduler", str(engine["scheduler"])),
        ("prefix cache", "on" if is_cached else "off"),
        ("seed", str(engine["seed"])),
    ]
