"""mlx-lm's models, of which only the classes and `load_model` are imported: its package would
import transformers and lower the limit of open files. Invariants: a `model_type` is looked up among
mlx-lm's own files before it is imported, and no code of a checkpoint is executed."""

import importlib
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path

from cadenza.backends.mlx.settings import settings_for_mlx_lm
from cadenza.errors import CheckpointError
from cadenza.json_object import read_json_object, shorten
from cadenza.weights.dtypes import WeightDType

PACKAGE = "mlx_lm"
_TOKENIZERS = f"{PACKAGE}.tokenizer_utils"
_CONFIG_FILE = "config.json"


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
