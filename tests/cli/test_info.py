"""`cadenza info`: the plan, without a weight being read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cadenza.checkpoint.opening import open_checkpoint
from cadenza.checkpoint.random_checkpoint import named_shape
from cadenza.cli.info import describe
from cadenza.config import EngineConfig
from cadenza.loading.build import plan_model
from cadenza.models.declaration import declare
from cadenza.models.model_config import ModelConfig
from cadenza.weights.weight_format import FORMAT_OF_NAME
from tests.checkpoint.config_writer import format_model_config
from tests.cli.harness import TINY, Cadenza
from tests.faces.seeing import write_seeing_model


def write_sparse_model(folder: Path, config: ModelConfig) -> int:
    """A folder whose weights are a hole in a file; returns the bytes that they claim to have."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(format_model_config(config)))
    format = FORMAT_OF_NAME[config.dtype]
    table, position = {}, 0
    for spec in declare(config):
        stop = position + spec.num_elements * format.numpy.itemsize
        table[spec.name] = {
            "dtype": format.code,
            "shape": spec.shape,
            "data_offsets": [position, stop],
        }
        position = stop
    header = json.dumps(table).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + position)
    return position


def test_json_and_text_tell_the_plan(cadenza: Cadenza, model: Path):
    ran = cadenza("info", model, "--json", "--num-pages", 40, "-c", 100, "-np", 3)
    assert ran.code == 0
    (facts,) = ran.objects
    assert facts["model"]["family"] == "llama"
    assert facts["model"]["eos_token_ids"] == [0]
    assert facts["text"]["has_chat_template"]
    assert facts["memory"]["num_pages"] == 40
    assert facts["memory"]["max_model_len"] == 100
    assert facts["memory"]["num_full_length_requests"] == 5  # 99 tokens of KV on 7 pages of 16
    assert facts["memory"]["kv_bytes"] == 40 * 16 * facts["memory"]["kv_bytes_per_token"]
    assert facts["engine"]["max_num_seqs"] == 3
    terms = ("weight", "kv", "scratch", "process", "front_end", "bodies")
    planned = sum(facts["memory"][f"{term}_bytes"] for term in terms)
    assert facts["memory"]["planned_bytes"] == planned < facts["memory"]["available_bytes"]
    at_start, reserved = (
        facts["memory"][f"{term}_bytes"] for term in ("resident_at_start", "reserved")
    )
    assert at_start + reserved == planned
    assert reserved > facts["memory"]["kv_bytes"]
    shown = cadenza("info", model, "--num-pages", 40, "-c", 100, "-np", 3).out
    for said in ("llama", "num_pages                 40", "num_full_length_requests  5", "bitwise"):
        assert said in shown


PLANNED = (
    ("--dtype bfloat16", "engine", "dtype", "bfloat16"),
    ("--kv-cache-dtype int8", "engine", "kv_cache_dtype", "int8"),
    ("--device cpu", "engine", "device", "cpu"),
    ("--backend xla", "engine", "backend", "xla:cpu"),
    ("--scheduler plain", "engine", "scheduler", "plain"),
    ("--no-enable-prefix-caching", "engine", "enable_prefix_caching", False),
    ("--seed 5", "engine", "seed", 5),
    ("--max-num-queued-reqs 6", "engine", "max_num_queued_reqs", 6),
    ("--kv-layout dense -c 64", "memory", "kv_layout", "dense"),
    ("--page-size 64", "memory", "page_size", 64),
    ("--kv-cache-memory-bytes 1048576", "memory", "kv_bytes", 1 << 20),
    ("--ops reference", "engine", "ops", "reference"),
    ("--max-num-batched-tokens 48", "engine", "max_num_batched_tokens", 48),
)


@pytest.mark.parametrize(
    ("trait", "value"),
    [("kernels_note", "the CPU has AMX, but the system refused it"), ("tile_rows", "4 to 16")],
)
def test_what_the_kernels_say_of_the_machine_is_told(model: Path, trait: str, value: str):
    checkpoint, config = open_checkpoint(model), EngineConfig(num_pages=40)
    plan = plan_model(checkpoint, config)
    for said in (None, value):
        told_plan = replace(plan, traits=replace(plan.traits, **{trait: said}))
        assert describe("tiny", checkpoint, told_plan, config)["engine"].get(trait) == said


def test_every_engine_flag_shows_in_the_plan(cadenza: Cadenza, model: Path):
    for arguments, section, key, value in PLANNED:
        ran = cadenza("info", model, "--json", *arguments.split())
        assert ran.code == 0, ran.err
        assert ran.objects[0][section][key] == value


def test_the_folder_of_stored_prefixes_is_told_with_its_bound_and_is_not_made(
    cadenza: Cadenza, model: Path, tmp_path: Path
):
    folder = tmp_path / "pages"
    told = cadenza("info", model, "--json", "--prefix-cache-disk", folder).objects[0]
    assert told["stored_prefixes"] == {
        "prefix_cache_disk": str(folder),
        "prefix_cache_disk_bytes": 8 << 30,
    }
    bounded = ("--prefix-cache-disk", folder, "--prefix-cache-disk-bytes", 1 << 30)
    assert "1.0 GiB" in cadenza("info", model, *bounded).out
    assert not folder.exists()
    assert "stored_prefixes" not in cadenza("info", model, "--json").objects[0]


def test_the_predicted_gains_of_sparse_prefill_are_told_by_shapes_and_by_measured_steps(
    cadenza: Cadenza,
):
    asked = ("--json", "--spec-prefill", '{"threshold": 500, "keep": 0.5}', "-np", 2)
    told = cadenza("info", "--measure", *asked).objects[0]
    facts, measured = told["sparse_prefill"], told["sparse_prefill_by_steps"]
    assert facts["draft_context"] == 2048
    assert facts["draft_kv_bytes"] > 0
    for gains in (facts, measured):
        assert (
            gains["gain_2048_keep_0.5"] < gains["gain_2048_keep_0.3"] < gains["gain_2048_keep_0.1"]
        )
    assert "sparse_prefill" not in cadenza("info", "--json").objects[0]


def test_a_model_without_tokenizer_is_described_too(cadenza: Cadenza, bare_model: Path):
    ran = cadenza("info", "--model", bare_model)
    assert "tokenizer                 –" in ran.out
    assert cadenza("info", bare_model, "--json").objects[0]["text"]["tokenizer"] is None


def test_a_large_shape_is_described_from_a_hole_in_a_file(cadenza: Cadenza, tmp_path: Path):
    config = replace(named_shape("smollm2-135m"), dtype="bfloat16")
    num_bytes = write_sparse_model(tmp_path / "sparse", config)
    (tmp_path / "sparse" / "model.safetensors").chmod(0o400)
    arguments = ("--dtype", "bfloat16", "--num-pages", 64, "-c", 512)
    ran = cadenza("info", tmp_path / "sparse", "--json", *arguments)
    if ran.code == 2:
        pytest.skip(f"this machine has no room for the plan: {ran.err}")
    assert ran.objects[0]["model"]["num_parameters"] == num_bytes // 2
    assert ran.objects[0]["memory"]["weight_bytes"] == num_bytes


def test_a_hundred_gigabytes_are_a_plan_that_does_not_fit_rather_than_an_allocation(
    cadenza: Cadenza, tmp_path: Path
):
    config = replace(TINY, hidden_size=1 << 15, intermediate_size=1 << 17, num_layers=64)
    num_bytes = write_sparse_model(tmp_path / "huge", config)
    assert num_bytes > 100e9
    ran = cadenza("info", tmp_path / "huge")
    assert ran.code == 2
    assert "available" in ran.err


def test_a_refused_folder_tells_what_it_is_and_why_it_is_not_loaded(
    cadenza: Cadenza, tmp_path: Path
):
    folder = tmp_path / "refused"
    write_sparse_model(folder, replace(TINY, num_layers=3))
    stated = json.loads((folder / "config.json").read_text())
    stated |= {"auto_map": {"AutoModel": "evil.Model"}, "hidden_size": 25}
    (folder / "config.json").write_text(json.dumps(stated))
    ran = cadenza("info", folder, "--json")
    assert ran.code == 3
    (facts,) = ran.objects
    assert not facts["model"]["is_supported"]
    assert facts["model"]["stated"]["num_hidden_layers"] == 3
    assert facts["model"]["tensors"]["dtypes"] == {"float32": len(declare(TINY)) + 9}
    assert facts["model"]["files"].keys() == {"config.json", "model.safetensors"}
    assert "auto_map" in facts["model"]["reason"]
    shown = cadenza("info", folder)
    assert shown.code == 3
    for said in ("is_supported", "hidden_size", "25", "reason", "auto_map"):
        assert said in shown.out


def test_garbage_tells_no_facts_and_fails_cleanly(cadenza: Cadenza, tmp_path: Path):
    (tmp_path / "config.json").write_bytes(b"\xff")
    (tmp_path / "model.safetensors").write_bytes(b"garbage")
    ran = cadenza("info", tmp_path, "--json")
    assert ran.code == 3
    assert (ran.objects[0]["model"]["stated"], ran.objects[0]["model"]["tensors"]) == ({}, {})


def test_an_empty_folder_and_a_folder_of_models_are_told_as_such(
    cadenza: Cadenza, model: Path, tmp_path: Path
):
    empty = cadenza("info", tmp_path)
    assert empty.code == 3
    assert f"the folder '{tmp_path}' is empty; name a folder" in empty.err
    assert [line for line in empty.out.splitlines() if not line.startswith(" ")] == ["model"]
    (tmp_path / "some-model").symlink_to(model)
    above = cadenza("info", tmp_path)
    assert above.code == 3
    assert "has no config.json, but its folders some-model have one" in above.err


def test_a_mixtures_experts_are_told_and_all_of_them_are_in_the_memory_plan(
    cadenza: Cadenza, tmp_path: Path
):
    folder = tmp_path / "mixture"
    num_bytes = write_sparse_model(folder, named_shape("tiny-qwen3-moe"))
    facts = cadenza("info", folder, "--json").objects[0]
    assert facts["memory"]["weight_bytes"] == num_bytes
    assert num_bytes > 4 * 3 * 13 * 3 * 96 * 40
    assert facts["model"]["num_experts"] == 13
    assert facts["model"]["num_expert_layers"] == 3
    assert "num_experts_per_token     4" in cadenza("info", folder).out


def test_steps_are_timed_if_that_is_asked(cadenza: Cadenza, model: Path):
    assert "steps" not in cadenza("info", model, "--json").objects[0]
    ran = cadenza("info", model, "--json", "--measure", "-c", 64, "--max-num-seqs", 2)
    assert ran.code == 0, ran.err
    steps = ran.objects[0]["steps"]
    assert steps["default_max_itl_ms"] >= 50
    assert 0 < steps["prefill_share_under_default"] <= 1
    assert steps["smallest_max_itl_ms_kept"] > steps["fixed_ms"] > 0
    assert steps["context_kept_under_default"] == 64


def test_a_model_with_recurrent_state_tells_its_slots(cadenza: Cadenza, tmp_path: Path):
    write_sparse_model(tmp_path / "model", named_shape("tiny-qwen3.5"))
    ran = cadenza("info", tmp_path / "model", "--json", "-np", 3, "--max-state-snapshots", 5)
    (facts,) = ran.objects
    memory = facts["memory"]
    assert memory["num_state_slots"] == 2 * 3 + 5
    assert memory["state_bytes"] == 11 * memory["state_bytes_per_slot"] > 0
    assert memory["row_state_bytes"] + memory["snapshot_bytes"] == memory["state_bytes"]
    terms = ("weight", "kv", "state", "scratch", "process", "front_end", "bodies")
    assert memory["planned_bytes"] == sum(memory[f"{term}_bytes"] for term in terms)


def test_a_model_that_sees_tells_what_it_takes(cadenza: Cadenza, tmp_path: Path, model: Path):
    folder = write_seeing_model(tmp_path / "seeing")
    limits = ("--num-pages", 40, "-c", 256, "-np", 3)
    ran = cadenza("info", folder, "--json", *limits, "--image-max-tokens", 64)
    (facts,) = ran.objects
    images = facts["images"]
    assert (images["max_images"], images["image_max_tokens"]) == (8, 64)
    assert images["tokens_of_640x480"] == 5 * 4  # four tiles and the whole
    assert facts["memory"]["image_bytes"] > 0
    assert "tokens_of_1920x1080" in cadenza("info", folder, *limits).out
    assert "images" not in cadenza("info", folder, "--json", *limits, "--no-images").objects[0]
    assert "images" not in cadenza("info", model, "--json", *limits).objects[0]
