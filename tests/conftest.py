"""Configuration of all tests: Hypothesis profiles, the `native` marker, trained models.

Owns the Hypothesis profiles (`ci`: the same small set of examples each time; `soak`: many, new ones
each time), the `native` marker and the folders of the trained models. Knows nothing of the engine.
Invariant: with CADENZA_REQUIRE_NATIVE=1 a package without native kernels is an error, never a row
of skips; a trained model that is absent is a skip that names `make real`.
"""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tools.passed_gates import PassedGates
from tools.real_models import GEMMA3, MODELS, SMOLLM2, RealModel, cache_folder, find

LIBRARY_SUFFIXES = frozenset({".so", ".dylib", ".pyd"})

# No deadline and no "too slow": a loaded machine must not fail a correct program.
settings.register_profile(
    "ci",
    max_examples=50,
    stateful_step_count=50,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "soak",
    max_examples=1000,
    stateful_step_count=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(PassedGates(config))
    if config.getoption("--hypothesis-profile") is None:
        settings.load_profile("ci")
    if not hasattr(config, "workerinput"):  # workers inherit it
        _restore_signals()
        _share_compiled_programs(config)
    if must_have_native() and not has_native_library():
        raise pytest.UsageError(
            "CADENZA_REQUIRE_NATIVE=1, but the installed package holds no native library; "
            "look at the build's output, or unset the variable to test without"
        )


def _restore_signals() -> None:
    """What the commands under test inherit; nohup and a shell's background ignore these two."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _share_compiled_programs(config: pytest.Config) -> None:
    """Workers and the processes under test compile each program once: JAX keys it by all it is made
    of. Tests that count compilations count those that the cache answers, too.
    """
    if hasattr(config, "cache"):
        folder = config.cache.mkdir("compiled-programs")
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a module that serves in processes are slow."""
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item.module, "serve_process"):
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("native") is not None and not has_native_library():
        pytest.skip("the package was built without native kernels")


def must_have_native() -> bool:
    return os.environ.get("CADENZA_REQUIRE_NATIVE") == "1"


def has_native_library() -> bool:
    """Whether the installed package holds a compiled library, found without importing it."""
    spec = importlib.util.find_spec("cadenza")
    places = (spec.submodule_search_locations or []) if spec else []
    return any(
        path.suffix in LIBRARY_SUFFIXES for place in places for path in Path(place).rglob("*")
    )


@pytest.fixture(scope="session", params=MODELS, ids=lambda model: model.name)
def real_folder(request: pytest.FixtureRequest) -> Path:
    """The folder of each trained model that `make real` makes."""
    return folder_of(request.param)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    return folder_of(SMOLLM2)


@pytest.fixture(scope="session")
def gemma3_folder() -> Path:
    return folder_of(GEMMA3)


def folder_of(model: RealModel) -> Path:
    folder = find(model, cache_folder(os.environ))
    if folder is None:
        pytest.skip(f"the trained model {model.name} is absent or outdated: run `make real`")
    return folder
