"""Flags: each field of `EngineConfig` is one, aliases work, a flag goes before the environment."""

from dataclasses import dataclass, fields
from types import UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import pytest

from cadenza.bench.serve_options import LoadOptions, ServerAddress
from cadenza.bench.workloads import Workload
from cadenza.cli.options import EngineFlags, flags_of
from cadenza.cli.sampling_flags import SamplingFlags
from cadenza.config import EngineConfig, EngineOptions, config_from_options
from cadenza.errors import ConfigError
from cadenza.option import Flag, flag
from cadenza.sparse_prefill import SpecPrefillConfig
from cadenza.speculative_config import SpeculativeConfig
from cadenza_bench.batching.plan import BatchingOptions
from cadenza_bench.compare.options import CompareOptions
from cadenza_bench.simulate.traffic import TrafficOptions
from cadenza_bench.spec_prefill.options import SpecPrefillOptions
from tests.cli.harness import Group, taken

DEFAULT = EngineConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    size: int = flag(3, "A flag of the command's own.")
    kind: Literal["a", "b"] = flag("a", "One with choices.")


GROUPS = (Group("own", Own), Group("sampling", SamplingFlags), Group("config", EngineFlags))


def parse(*arguments: str, env: dict[str, str] | None = None) -> tuple[EngineConfig, SamplingFlags]:
    """What a command sees of `arguments`. Raises what it raises."""
    found = taken(GROUPS, arguments, env)
    assert found["own"].size == 3
    return found["config"], found["sampling"]


def config_of(*arguments: str, env: dict[str, str] | None = None) -> EngineConfig:
    return parse(*arguments, env=env)[0]


# For each field that is no switch: a value that is not the default, as written and as meant.
VALUES = {
    "backend": ("xla", "xla"),
    "device": ("cpu", "cpu"),
    "ops": ("split", "split"),
    "revision": ("v1.0", "v1.0"),
    "dtype": ("bfloat16", "bfloat16"),
    "quantization": ("int4", "int4"),
    "kv_cache_dtype": ("int8", "int8"),
    "weight_cache_bytes": ("3000000", 3000000),
    "arithmetic": ("portable", "portable"),
    "max_model_len": ("512", 512),
    "max_num_seqs": ("5", 5),
    "max_num_batched_tokens": ("33", 33),
    "kv_cache_memory_bytes": ("4096", 4096),
    "num_pages": ("7", 7),
    "tensor_parallel_size": ("4", 4),
    "kv_layout": ("dense", "dense"),
    "page_size": ("32", 32),
    "scheduler": ("plain", "plain"),
    "prefix_cache_memory_share": ("0.5", 0.5),
    "max_state_snapshots": ("7", 7),
    "state_snapshot_interval": ("64", 64),
    "prefix_cache_disk": ("pages", "pages"),
    "prefix_cache_disk_bytes": ("2000000", 2000000),
    "mmproj": ("mmproj.gguf", "mmproj.gguf"),
    "image_cache_bytes": ("3000000", 3000000),
    "image_max_tokens": ("512", 512),
    "generation_config": ("none", "none"),
    "chat_template": ("{{ messages }}", "{{ messages }}"),
    "max_num_queued_reqs": ("9", 9),
    "max_num_queued_tokens": ("900", 900),
    "max_consecutive_step_errors": ("4", 4),
    "max_itl_ms": ("62.5", 62.5),
    "batching": ("static", "static"),
    "scheduler_headroom_gb": ("0.5", 0.5),
    "gpu_memory_utilization": ("0.5", 0.5),
    "scheduling_policy": ("priority", "priority"),
    "starvation_guard": ("2.5", 2.5),
    "admission": ("optimistic", "optimistic"),
    "seed": ("11", 11),
    "speculative_config": ('{"method": "ngram"}', SpeculativeConfig(method="ngram")),
    "spec_prefill": ('{"keep": 0.1, "head": 0}', SpecPrefillConfig(keep=0.1, head=0)),
}

FLAGS: dict[str, Flag] = {each.name: each.metadata["flag"] for each in fields(EngineConfig)}
ALIASES = [(alias, name) for name, described in FLAGS.items() for alias in described.aliases]


def test_every_field_of_engine_config_is_described_and_tested():
    names = {field.name for field in fields(EngineConfig)}
    assert set(VALUES) | {"enable_prefix_caching", "images"} == names


def test_every_setting_of_the_benchmarks_is_a_flag():
    groups = (
        *(Workload, TrafficOptions, BatchingOptions, SpecPrefillOptions),
        *(ServerAddress, LoadOptions, CompareOptions),
    )
    for group in groups:
        others = OF_SERVE.get(group, set())
        names = {each.name for each in flags_of(group, {})}
        assert names | others == {field.name for field in fields(group)}


# A word of the command line, and what no flag sets.
OF_SERVE = {ServerAddress: {"url"}, LoadOptions: {"timeout_s"}}


def test_nothing_given_is_engine_configs_own_default():
    assert parse() == (DEFAULT, SamplingFlags())


@pytest.mark.parametrize("name", VALUES)
def test_a_flag_its_variable_and_pythons_option_set_a_field_and_the_flag_comes_first(name: str):
    written, meant = VALUES[name]
    flag, default = "--" + name.replace("_", "-"), getattr(DEFAULT, name)
    assert meant != default
    of_flag = config_of(flag, written)
    assert getattr(of_flag, name) == meant
    assert getattr(config_from_options({name: meant}), name) == meant
    env = {f"CADENZA_{name.upper()}": written}
    assert getattr(config_of(env=env), name) == meant
    # As a sampling flag, a seed of 0 is a seed; any word names a revision, a file or a folder.
    if name not in ("seed", "revision", "chat_template", "prefix_cache_disk", "mmproj"):
        of_none = "none" if name in ("speculative_config", "spec_prefill") else "auto"
        given = of_none if default is None else str(default)
        assert getattr(config_of(flag, given, env=env), name) == default
    for word in ("auto", "none"):
        try:
            found = config_of(flag, word)
        except (ConfigError, SystemExit):
            continue
        assert config_from_options({name: word}) == found


def test_the_typed_options_of_python_are_the_fields_of_engine_config_and_what_they_take():
    typed, own = get_type_hints(EngineOptions), get_type_hints(EngineConfig)
    assert set(typed) == set(own)
    for name, kind in own.items():
        assert kinds_of(kind) <= kinds_of(typed[name]), name
        if {int, float} & kinds_of(kind) and str not in kinds_of(kind):
            if Literal["auto"] in kinds_of(typed[name]):
                config_from_options({name: "auto"})
            else:
                with pytest.raises(ConfigError):
                    config_from_options({name: "auto"})


def kinds_of(kind: object) -> set[object]:
    """The types of a union, with each word of a Literal as a Literal of its own."""
    if get_origin(kind) is Literal:
        return {Literal[word] for word in get_args(kind)}  # type: ignore[valid-type]
    if get_origin(kind) in (Union, UnionType):
        return set().union(*map(kinds_of, get_args(kind)))
    return {kind}


def test_prefix_caching_is_a_switch_on_the_command_line_and_in_the_environment():
    off = {"CADENZA_ENABLE_PREFIX_CACHING": "0"}
    assert config_of().enable_prefix_caching
    assert not config_of("--no-enable-prefix-caching").enable_prefix_caching
    assert not config_of(env=off).enable_prefix_caching
    assert config_of("--enable-prefix-caching", env=off).enable_prefix_caching


def test_an_empty_variable_counts_as_not_set():
    assert config_of(env={"CADENZA_MAX_NUM_SEQS": ""}) == DEFAULT


def test_every_known_alias_means_its_flag():
    known = """--ctx-size -c --context-length --parallel -np --max-running-requests --max-batch-size
        --decode-concurrency --prefill-step-size --scheduler-policy -tp --tp-size"""
    assert set(known.split()) == {alias for alias, _ in ALIASES}
    for alias, name in ALIASES:
        written, meant = VALUES[name]
        assert getattr(config_of(alias, written), name) == meant


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--backend", "cuda"), "--backend 'cuda' is not one of"),
        (("--max-num-seqs", "0"), "--max-num-seqs 0"),
        (("--page-size", "20"), "not a multiple of 16"),
        (("--seed", "-1"), "--seed -1"),
        (("--kind", "c"), "--kind 'c' is not one of a, b"),
    ],
)
def test_a_value_out_of_bounds_is_a_config_error_that_names_the_flag(arguments, said):
    with pytest.raises(ConfigError, match=said):
        parse(*arguments)


def test_a_word_in_place_of_a_number_is_a_usage_error():
    with pytest.raises(SystemExit) as caught:
        parse("--max-num-seqs", "many")
    assert caught.value.code == 2


def test_sampling_flags_change_only_what_was_given():
    _, sampling = parse("--top-k", "5", "--temperature", "0", "--ignore-eos")
    assert sampling.changes() == {"top_k": 5, "temperature": 0.0, "ignore_eos": True}
    assert parse("--top-p", "0.5", "--min-p", "0.1")[1].changes() == {"top_p": 0.5, "min_p": 0.1}


def test_one_seed_is_the_requests_and_the_engines():
    config, sampling = parse("--seed", "7")
    assert (config.seed, sampling.seed) == (7, 7)
    config, sampling = parse(env={"CADENZA_SEED": "8"})
    assert (config.seed, sampling.seed) == (8, 8)
    assert parse()[1].seed is None


def test_a_group_of_a_commands_own_becomes_flags():
    assert [each.name for each in flags_of(Own, {})] == ["size", "kind"]


def test_auto_asks_for_the_number_of_rows_that_fits_and_no_flag_for_sixteen():
    assert config_of("--max-num-seqs", "auto").max_num_seqs is None
    assert config_of(env={"CADENZA_MAX_NUM_SEQS": "auto"}).max_num_seqs is None
    assert config_of("-np", "7").max_num_seqs == 7
    assert config_of().max_num_seqs == DEFAULT.max_num_seqs == 16
    with pytest.raises(ConfigError, match=r"--max-num-seqs 20000 must be .* from 1 to 16384"):
        config_of("--max-num-seqs", "20000")
