"""Writes README.md's table of model families.

    python -m tools.family_table            # the table
    python -m tools.family_table --measure  # first docs/results/families.json, from the fixtures

A family's row has its models, its `model_type`, its architectures in GGUF files, what its layers
consist of, and the largest error of a log probability against transformers' in float32, as a share
of the range of its logits: over the fixtures that `tests/oracle/make_fixtures` has written, in
chunks and a token at a time. Invariant: every family and every architecture is in one row.
"""

import json
import sys
from pathlib import Path

from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.models.model_config import ModelConfig

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FIXTURES = ROOT / "tests" / "fixtures"
FIGURES = ROOT / "docs" / "families.json"
BEGIN = "<!-- families: written by tools/family_table.py -->"
END = "<!-- end of families -->"

# The models of a row, its families and its architectures.
ROWS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Qwen3.5 to 3.8": (("qwen3_5_text",), ("qwen35",)),
    "Qwen3.5 to 3.8, mixtures": (("qwen3_5_moe_text",), ("qwen35moe",)),
    "Qwen3, Qwen3-VL": (("qwen3",), ("qwen3", "qwen3vl")),
    "Qwen3, Qwen3-VL, mixtures": (("qwen3_moe",), ("qwen3moe", "qwen3vlmoe")),
    "Qwen2 and 2.5, Qwen2-VL and 2.5-VL": (("qwen2",), ("qwen2", "qwen2vl")),
    "Gemma 4": (("gemma4_text", "gemma4_unified_text"), ("gemma4",)),
    "Gemma 3": (("gemma3_text",), ("gemma3",)),
    "Gemma 2": (("gemma2",), ("gemma2",)),
    "gpt-oss": (("gpt_oss",), ("gpt-oss",)),
    "DeepSeek-V3 and R1": (("deepseek_v3",), ("deepseek2",)),
    "GLM-4.7-Flash": (("glm4_moe_lite",), ("deepseek2",)),
    "LFM2, LFM2.5": (("lfm2",), ("lfm2",)),
    "LFM2, mixtures": (("lfm2_moe",), ("lfm2moe",)),
    "Granite 4": (("granitemoehybrid",), ("granitehybrid",)),
    "Granite 3": (("granite",), ("granite",)),
    "Llama 2 to 3.3, SmolLM2, and their like": (("llama",), ("llama",)),
    "Mistral": (("mistral", "ministral"), ("llama",)),
    "Ministral 3, Devstral 2": (("ministral3",), ("mistral3",)),
    "Mixtral": (("mixtral",), ("llama",)),
    "SmolLM3": (("smollm3",), ("smollm3",)),
    "Phi-3, Phi-4": (("phi3",), ("phi3",)),
    "OLMo 2": (("olmo2",), ("olmo2",)),
    "OLMoE": (("olmoe",), ("olmoe",)),
    "MiMo": (("mimo",), ()),
}


def main(arguments: list[str]) -> None:
    if "--measure" in arguments:
        FIGURES.write_text(json.dumps(measure(), indent=2, sort_keys=True) + "\n")
        print(FIGURES.relative_to(ROOT))
    README.write_text(with_table(README.read_text(), table()), encoding="utf-8")
    print(README.relative_to(ROOT))


def table() -> str:
    """The table in Markdown."""
    errors: dict[str, float] = json.loads(FIGURES.read_text())
    head = ("models", "`model_type`", "GGUF", "layers", "against transformers")
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for models, (families, architectures) in ROWS.items():
        configs = [config for config in fixture_configs().values() if config.family in families]
        parts = {part for config in configs for part in parts_of(config)}
        cells = (
            models,
            ", ".join(f"`{each}`" for each in families),
            ", ".join(f"`{each}`" for each in architectures) or "none",
            ", ".join(sorted(parts, key=PARTS.index)),
            f"{max(errors[each] for each in families if each in errors):.0e}".replace("e-0", "e-"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


PARTS = ("full attention", "windows", "sinks", "latent KV", "recurrent states", "experts")


def parts_of(config: ModelConfig) -> set[str]:
    """What layers of a model consist of besides plain MLPs."""
    found: set[str] = set()
    for kind in config.layer_kinds:
        if kind.recurrence is not None:
            found.add("recurrent states")
        elif kind.latent is not None:
            found.add("latent KV")
        else:
            found.add("windows" if kind.window is not None else "full attention")
        if kind.has_experts:
            found.add("experts")
    return found | ({"sinks"} if config.has_attention_sinks else set())


def fixture_configs() -> dict[str, ModelConfig]:
    folders = sorted(path.parent for path in FIXTURES.glob("*/expected.npz"))
    return {folder.name: named_shape(str(folder)) for folder in folders}


def measure() -> dict[str, float]:
    """The largest error of each family, by its `model_type`."""
    import numpy as np

    from cadenza.backends.xla.ops.native import NativeOps
    from tests.xla.test_fixtures import open_fixture, step_errors

    found: dict[str, float] = {}
    for name, config in fixture_configs().items():
        fixture = open_fixture(FIXTURES / name)
        runner = fixture.runner(fixture.weights, NativeOps)
        runner.warmup()
        for chunk in (1, 7, 32):
            runner.reset()
            error = max(step_errors(runner, fixture, chunk)) / float(np.ptp(fixture.logits))
            found[config.family] = max(found.get(config.family, 0.0), error)
        runner.close()
        print(f"{name}: {found[config.family]:.1e}", flush=True)
    return {family: float(f"{error:.1e}") for family, error in found.items()}


def with_table(page: str, rows: str, begin: str = BEGIN, end: str = END) -> str:
    """The page with the table between its marks."""
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{rows}\n\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    main(sys.argv[1:])
