"""mlx-lm's models, of which only the classes and `load_model` are imported: its package would
import transformers and lower the limit of open files. Invariants: a `model_type` is looked up among
mlx-lm's own files before it is imported, and no code of a checkpoint is executed."""

import importlib
import math
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_map_with_path

from cadenza.errors import CheckpointError
from cadenza.json_object import read_json_object, shorten
from cadenza.weights.weight_format import WeightDType

Settings = dict[str, Any]
_Reader = Callable[[Mapping[str, Any]], Settings]

TEXT_CONFIG = "text_config"

# Text models by themselves, and the type of mlx-lm that reads their settings and tensors.
TEXT_TYPES: Mapping[str, str] = {
    "gemma4_unified_text": "gemma4_text",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}

_FULL, _SLIDING = "full_attention", "sliding_attention"

_GRANITE_LAYERS = {"linear_attention": "mamba", _FULL: "attention"}
PACKAGE = "mlx_lm"
_TOKENIZERS = f"{PACKAGE}.tokenizer_utils"
_CONFIG_FILE = "config.json"
PREFILL_STEP = 2048  # tokens of a prompt in one call, as in mlx-lm


def settings_for_mlx_lm(config: Mapping[str, Any]) -> Settings:
    """config.json's settings under the names that mlx-lm reads: transformers 5 writes some under
    others, and mlx-lm takes its default for an absent name. A setting under a name that mlx-lm
    reads stays, except where transformers would compute something else."""
    changes = _own_settings(config)
    if config.get("model_type") in TEXT_TYPES:
        changes["model_type"] = TEXT_TYPES[config["model_type"]]
    inner = config.get(TEXT_CONFIG)
    if not isinstance(inner, dict):
        return changes
    inner_changes = _own_settings(inner)
    if "tie_word_embeddings" in config:
        inner_changes["tie_word_embeddings"] = config["tie_word_embeddings"]
    if inner_changes:
        changes[TEXT_CONFIG] = {**inner, **inner_changes}
    if "vocab_size" in inner and "vocab_size" not in config:
        changes["vocab_size"] = inner["vocab_size"]
    return changes


def _own_settings(config: Mapping[str, Any]) -> Settings:
    model_type = config.get("model_type")
    changes = _rope_settings(config)
    if isinstance(model_type, str) and model_type in _BY_TYPE:
        changes |= _BY_TYPE[model_type](config)
    return changes


def _rope_settings(config: Mapping[str, Any]) -> Settings:
    # Most models of mlx-lm read `rope_theta` and `rope_scaling`; some know a scaling as `type`
    # only.
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        return {}
    full, sliding = parameters.get(_FULL, parameters), parameters.get(_SLIDING)
    if not isinstance(full, dict):
        return {}
    changes: Settings = {}
    scaled = _with_mscale(full)
    if full is parameters and scaled is not full:
        changes["rope_parameters"] = scaled
    found = {key: full[key] for key in ("rope_theta", "partial_rotary_factor") if key in full}
    if isinstance(sliding, dict) and "rope_theta" in sliding:
        found["rope_local_base_freq"] = sliding["rope_theta"]
    if full.get("rope_type", "default") != "default":
        found["rope_scaling"] = {"type": full["rope_type"], **scaled}
    return changes | {key: value for key, value in found.items() if config.get(key) is None}


def _with_mscale(scaling: Settings) -> Settings:
    """A yarn scaling whose `mscale` gives its `attention_factor`, which mlx-lm does not read."""
    wanted, factor = scaling.get("attention_factor"), scaling.get("factor")
    is_yarn = scaling.get("rope_type") == "yarn"
    if not is_yarn or not isinstance(wanted, int | float) or not isinstance(factor, int | float):
        return scaling
    if scaling.get("mscale_all_dim") or factor <= 1:
        return scaling
    return {**scaling, "mscale": (wanted - 1) / (0.1 * math.log(factor)), "mscale_all_dim": 0}


def _granite_settings(config: Mapping[str, Any]) -> Settings:
    changes: Settings = {"time_step_limit": [0.0, math.inf]}
    types = config.get("layer_types")
    if isinstance(types, list):
        changes["layer_types"] = [_GRANITE_LAYERS.get(str(each), each) for each in types]
    if config.get("position_embedding_type") is None:
        changes["position_embedding_type"] = "nope"
    if config.get("num_local_experts") == 0 and "shared_intermediate_size" in config:
        changes["intermediate_size"] = config["shared_intermediate_size"]
    return changes


def _interval(name: str) -> _Reader:
    def read(config: Mapping[str, Any]) -> Settings:
        types = config.get("layer_types")
        if not isinstance(types, list) or _FULL not in types:
            return {}
        return {name: types.index(_FULL) + 1}

    return read


def _absent(defaults: Callable[[Mapping[str, Any]], Settings]) -> _Reader:
    """Defaults of transformers for settings that mlx-lm requires, or for which it takes others."""
    return lambda config: {
        key: value for key, value in defaults(config).items() if key not in config
    }


def _glm_settings(config: Mapping[str, Any]) -> Settings:
    """How many of the first layers have no experts, which newer files list."""
    types = config.get("mlp_layer_types")
    if not isinstance(types, list) or "sparse" not in types:
        return {}
    return {"first_k_dense_replace": types.index("sparse")}


_GEMMA = _absent(lambda _: {"num_kv_shared_layers": 0, "use_double_wide_mlp": False})
_GEMMA_UNIFIED = _absent(
    lambda _: {
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
    }
)
_LFM2 = _absent(
    lambda config: {
        "block_dim": config.get("hidden_size"),
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
        "conv_L_cache": 3,
        "conv_bias": False,
        "norm_eps": 1e-5,
    }
)

_BY_TYPE: Mapping[str, _Reader] = {
    "gemma3_text": _interval("sliding_window_pattern"),
    "gemma4_text": _GEMMA,
    "gemma4_unified_text": _GEMMA_UNIFIED,
    "glm4_moe_lite": _glm_settings,
    "granitemoehybrid": _granite_settings,
    "lfm2": _LFM2,
    "qwen3_5_text": _interval("full_attention_interval"),
    "qwen3_5_moe_text": _interval("full_attention_interval"),
}


@dataclass(frozen=True, slots=True)
class ZooModel:
    """A model of mlx-lm; `new_caches` makes mlx-lm's own caches for one sequence."""

    model: Any
    new_caches: Callable[[], list[Any]]


def load_zoo_model(folder: Path) -> ZooModel:
    """Weights are read when used. Raises CheckpointError if mlx-lm lacks the type, or cannot load
    the weights."""
    zoo = open_zoo()
    model = zoo.load(folder)
    return ZooModel(model, lambda: zoo.new_caches(model))


def set_dtype(loaded: ZooModel, name: WeightDType) -> None:
    """Converts the parameters that mlx-lm's own conversion would; nothing is computed yet."""
    dtype: mx.Dtype = getattr(mx, name)
    may_convert = getattr(loaded.model, "cast_predicate", lambda _: True)

    def convert(path: str, array: mx.array) -> mx.array:
        is_changed = mx.issubdtype(array.dtype, mx.floating) and may_convert(path)
        return array.astype(dtype) if is_changed and array.dtype != dtype else array

    loaded.model.update(tree_map_with_path(convert, loaded.model.parameters()))


class Zoo:
    """Use `open_zoo`, which makes one for the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, ModuleType] = {}
        self._lock = threading.Lock()

    def load(self, folder: Path) -> Any:
        config = read_json_object(folder / _CONFIG_FILE)
        if config.get("model_file") is not None:
            raise CheckpointError(
                f"{_CONFIG_FILE}: model_file is set; code from a checkpoint is never run; use a "
                f"checkpoint that needs none"
            )
        with self._imported() as utils:
            changes = settings_for_mlx_lm(utils.load_config(folder))
            model_type = changes.get("model_type", config.get("model_type"))
            self.check_model_type(model_type, utils.MODEL_REMAPPING)
            try:
                model, _ = utils.load_model(folder, lazy=True, model_config=changes)
            except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"mlx-lm cannot load the model in {str(folder)!r} "
                    f"({type(error).__name__}: {shorten(str(error))}); use a checkpoint that "
                    f"mlx-lm supports, or another --backend"
                ) from error
            return model

    def new_caches(self, model: Any) -> list[Any]:
        return self._modules[f"{PACKAGE}.models.cache"].make_prompt_cache(model)

    def check_model_type(self, model_type: object, remapping: dict[str, str]) -> None:
        """Raises CheckpointError unless mlx-lm has a model file for `model_type`."""
        known = {path.stem for path in (self._folder / "models").glob("*.py")} - {"__init__"}
        if not isinstance(model_type, str) or remapping.get(model_type, model_type) not in known:
            raise CheckpointError(
                f"{_CONFIG_FILE}: model_type is {shorten(model_type)}, which mlx-lm does not have; "
                f"use a model that it supports, or another --backend"
            )

    @contextmanager
    def _imported(self) -> Generator[Any]:
        """`mlx_lm.utils`, while its modules are in `sys.modules`, with stand-ins for the package,
        the tokenizers and `resource`, whose `setrlimit` changes nothing."""
        with self._lock:
            before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_own(name)}
            resource = sys.modules.pop("resource", None)
            sys.modules.update(self._modules or _stand_ins(self._folder))
            sys.modules["resource"] = _without_limits()
            try:
                utils = importlib.import_module(f"{PACKAGE}.utils")
                importlib.import_module(f"{PACKAGE}.models.cache")
                self._modules.update(_own_modules())
                yield utils
            finally:
                self._modules.update(_own_modules())
                for name in self._modules:
                    sys.modules.pop(name, None)
                del sys.modules["resource"]
                sys.modules.update(before)
                if resource is not None:
                    sys.modules["resource"] = resource


@cache
def open_zoo() -> Zoo:
    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Zoo(Path(next(iter(spec.submodule_search_locations))))


def _is_own(name: str) -> bool:
    return name == PACKAGE or name.startswith(f"{PACKAGE}.")


def _own_modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if _is_own(name)}


def _stand_ins(folder: Path) -> dict[str, ModuleType]:
    package = ModuleType(PACKAGE)
    package.__path__ = [str(folder)]
    package.__spec__ = ModuleSpec(PACKAGE, None, is_package=True)
    vars(package)["__version__"] = "0"
    tokenizers = ModuleType(_TOKENIZERS)
    vars(tokenizers).update(TokenizerWrapper=object, load=_refuse_tokenizer)
    return {PACKAGE: package, _TOKENIZERS: tokenizers}


def _without_limits() -> ModuleType:
    module = ModuleType("resource")
    vars(module).update(RLIMIT_NOFILE=0, setrlimit=lambda *_: None)
    return module


def _refuse_tokenizer(*_: object) -> None:
    raise AssertionError("mlx-lm's tokenizers are not used")


class MlxReferenceModel:
    """mlx-lm's own loop over one sequence in float32, with its own caches, for `verify`: no slot,
    mask, chunk, offset or sampling code of the runner. Belongs to the thread that makes it, like
    MLX's streams."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._loaded = load_zoo_model(folder)
        self._vocab_size = vocab_size
        self._caches: list[Any] = []
        set_dtype(self._loaded, "float32")

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def start(self) -> None:
        self._caches = self._loaded.new_caches()

    def append(self, token_ids: list[int]) -> npt.NDArray[np.float32]:
        logits = np.empty(0, np.float32)
        for begin in range(0, len(token_ids), PREFILL_STEP):
            part = mx.array([token_ids[begin : begin + PREFILL_STEP]])
            output: mx.array = self._loaded.model(part, cache=self._caches)
            logits = np.array(output[0, -1].astype(mx.float32))
        return logits
