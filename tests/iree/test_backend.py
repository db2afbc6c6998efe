"""What the IREE backend refuses, and says of itself, before anything is loaded."""

import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cadenza.backends.iree.backend import IreeBackend
from cadenza.backends.iree.manifest import Cpu, Manifest, read_manifest, read_module
from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.errors import CheckpointError, ConfigError
from cadenza.loading.build import plan_model
from cadenza.speculative_config import SpeculativeConfig

CONFIG: dict[str, Any] = {"backend": "iree", "max_num_seqs": 4}


@pytest.fixture(scope="module")
def bundled() -> Checkpoint:
    return open_checkpoint(None)


@pytest.fixture
def copied(bundled: Checkpoint, tmp_path: Path) -> Path:
    return shutil.copytree(bundled.folder, tmp_path / "model")


def rewrite(folder: Path, **changes: Any) -> Checkpoint:
    path = folder / "iree" / "manifest.json"
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, **changes)))
    return open_checkpoint(folder)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_batched_tokens": 65}, "--max-num-batched-tokens 65 is above the 64"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8"),
        ({"kv_layout": "paged"}, "--kv-layout paged"),
        ({"quantization": "int8"}, "--quantization int8"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16"),
        ({"arithmetic": "portable"}, "--arithmetic portable"),
        ({"ops": "reference"}, "--ops reference"),
        ({"device": "cuda"}, "--device cuda: the compiled modules are for llvm-cpu"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({"prefix_cache_disk": "pages"}, "--prefix-cache-disk"),
        (
            {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3)},
            "--speculative-config",
        ),
    ],
)
def test_what_was_not_compiled_is_refused_by_its_flag(
    bundled: Checkpoint, options: dict[str, Any], said: str
):
    with pytest.raises(ConfigError) as refused:
        plan_model(bundled, EngineConfig(**CONFIG | options))
    assert said in str(refused.value)


@pytest.mark.parametrize(("asked", "num_rows"), [(3, 3), (8, 8), (9, 8), (16, 8), (None, 8)])
def test_more_rows_than_the_modules_have_become_as_many_and_a_line_says_so(
    bundled: Checkpoint, caplog: pytest.LogCaptureFixture, asked: int | None, num_rows: int
):
    config = EngineConfig(backend="iree", max_num_seqs=asked)
    plan = plan_model(bundled, config)
    assert plan.limits.max_num_seqs == num_rows
    warnings = [each.getMessage() for each in caplog.records]
    said = f"--max-num-seqs {asked}: 8 rows run, the compiled modules have no more; "
    assert warnings == ([f"{said}further requests wait"] if (asked or 0) > num_rows else [])
    assert ("8 rows (auto: the compiled modules have no more)" in plan.summary) is (
        num_rows != asked
    )


def test_the_default_of_rows_gives_way(bundled: Checkpoint):
    assert plan_model(bundled, EngineConfig(backend="iree")).limits.max_num_seqs == 8


def test_a_context_above_that_of_the_modules_is_refused(copied: Path):
    checkpoint = rewrite(copied, max_model_len=1024)
    assert plan_model(checkpoint, EngineConfig(**CONFIG)).limits.max_model_len == 1024
    with pytest.raises(ConfigError, match="--max-model-len 1040 is above the 1024"):
        plan_model(checkpoint, EngineConfig(**CONFIG, max_model_len=1040))


def test_embeddings_images_and_late_masks_are_no_capabilities(bundled: Checkpoint):
    traits = IreeBackend().describe("auto", "auto", bundled)
    assert (traits.capabilities, traits.whole_span) == (frozenset(), 0)


def test_a_missing_runtime_is_explained(bundled: Checkpoint):
    with pytest.raises(ConfigError, match=r"needs iree-base-runtime.*pip install"):
        IreeBackend(find=lambda _: None).describe("auto", "auto", bundled)


def test_a_model_without_modules_is_told_how_to_get_them(copied: Path):
    shutil.rmtree(copied / "iree")
    with pytest.raises(CheckpointError, match="cadenza export"):
        IreeBackend().describe("auto", "auto", open_checkpoint(copied))


def test_modules_of_another_config_version_or_format_are_refused(copied: Path):
    for changes, said in (
        ({"config": "0" * 64}, r"another config\.json"),
        ({"compiler": "3.12.0"}, r"compiled by IREE 3\.12\.0, and the runtime is"),
        ({"format": 2}, "has the format 2"),
    ):
        good = (copied / "iree" / "manifest.json").read_bytes()
        checkpoint = rewrite(copied, **changes)
        with pytest.raises(CheckpointError, match=said):
            IreeBackend().describe("auto", "auto", checkpoint)
        (copied / "iree" / "manifest.json").write_bytes(good)


def test_modules_for_another_cpu_are_refused_instead_of_ending_in_an_illegal_instruction(
    copied: Path,
):
    checkpoint = rewrite(copied, features=("avx2", "avx512f"))
    old = Cpu(architecture="x86_64", flags=frozenset({"avx2", "fma"}))
    with pytest.raises(CheckpointError, match="a CPU with avx512f"):
        IreeBackend(cpu=old).describe("auto", "auto", checkpoint)
    new = Cpu(architecture="x86_64", flags=frozenset({"avx2", "avx512f"}))
    assert IreeBackend(cpu=new).describe("cpu", "auto", checkpoint).name == "iree:llvm-cpu"
    arm = Cpu(architecture="aarch64", flags=frozenset())
    with pytest.raises(CheckpointError, match="a CPU with x86_64"):
        IreeBackend(cpu=arm).describe("auto", "auto", rewrite(copied, features=()))


def test_modules_for_a_gpu_are_not_served(copied: Path):
    for target in ("vulkan-spirv", "cuda"):
        with pytest.raises(ConfigError, match=f"modules for {target} are compiled and not served"):
            IreeBackend().describe("auto", "auto", rewrite(copied, target=target))


def test_a_damaged_module_is_refused(copied: Path):
    program = read_manifest(copied).buckets[0].program("copy")
    path = copied / "iree" / program.file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="is not the module"):
        read_module(copied, program)
    outside = msgspec.structs.replace(program, file="../config.json")
    with pytest.raises(CheckpointError, match="outside its folder"):
        read_module(copied, outside)


def test_the_arithmetic_names_the_modules_and_who_made_them(bundled: Checkpoint):
    manifest = read_manifest(bundled.folder)
    described = IreeBackend().describe_arithmetic("auto", "auto", bundled)
    digests = [each.sha256 for bucket in manifest.buckets for each in bucket.programs]
    assert {version("iree-base-runtime"), manifest.compiler, *digests} <= set(described)
    assert "--iree-llvmcpu-target-cpu=generic" in described
    assert IreeBackend().name_arithmetic(bundled, None) is None  # type: ignore[arg-type]
