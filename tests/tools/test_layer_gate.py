"""The project's own import contracts, run on a small tree that breaks each of them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gates


REPOSITORY = Path(__file__).parents[2]
RUN_CONTRACTS = "from importlinter.cli import lint_imports_command as run; run()"

PACKAGES = (
    "",
    "backends",
    "backends.base",
    "backends.fake",
    "backends.iree",
    "backends.mlx",
    "backends.xla",
    "batch",
    "bench",
    "checkpoint",
    "cli",
    "cluster",
    "drafting",
    "engine",
    "frontend",
    "kv",
    "loading",
    "media",
    "models",
    "scheduler",
    "server",
    "text",
    "verification",
    "vision",
    "weights",
)
MODULES = (
    "backends.iree.runner",
    "config",
    "request",
    "outputs",
    "errors",
    "serve_app",
    "scheduler.scheduler",
    "engine.core",
    "backends.xla.reference_model",
    "models.rope_config",
    "models.rope_factors",
)

# Packages beside the product's; their modules have their full names below.
LABORATORY = ("cadenza_bench", "cadenza_bench.simulate")

LAWFUL = (
    ("serve_app", "cadenza.cli"),
    ("serve_app", "ray"),
    ("cli", "cadenza.cluster"),
    ("cluster", "cadenza.engine"),
    ("cli", "cadenza.server"),
    ("cli", "cadenza.bench"),
    ("bench", "cadenza"),
    ("server", "cadenza.engine"),
    ("server", "cadenza.text"),
    ("engine", "cadenza.backends"),
    ("engine", "cadenza.backends.base"),
    ("bench", "cadenza.backends.base"),
    ("cadenza_bench", "cadenza.bench"),
    ("cadenza_bench.simulate", "cadenza.backends.base"),
    ("cadenza_bench", "cadenza_bench.simulate"),
    ("cadenza_bench.simulate", "cadenza.scheduler.scheduler"),
    ("cli", "cadenza.backends"),
    ("backends", "cadenza.backends.base"),
    ("server", "cadenza.frontend"),
    ("verification", "cadenza.loading"),
    ("verification", "cadenza.scheduler"),
    ("frontend", "cadenza.loading"),
    ("frontend", "cadenza.text"),
    ("loading", "cadenza.engine"),
    ("loading", "cadenza.checkpoint"),
    ("engine.core", "cadenza.scheduler"),
    ("backends.xla", "jax"),
    ("backends.xla", "jaxlib"),
    ("backends.xla", "cadenza.backends.base"),
    ("backends.xla", "cadenza.models.rope_factors"),
    ("backends.xla.reference_model", "cadenza.models.rope_config"),
    ("backends.mlx", "mlx"),
    ("backends.iree.runner", "iree"),
    ("backends.base", "cadenza.scheduler"),
    ("backends.base", "cadenza.checkpoint"),
    ("checkpoint", "ml_dtypes"),
    ("checkpoint", "cadenza.vision"),
    ("engine", "cadenza.vision"),
    ("scheduler", "numpy"),
    ("scheduler", "hashlib"),
    ("scheduler.scheduler", "collections"),
    ("request", "cadenza.config"),
    ("text", "jinja2"),
    ("media", "PIL"),
    ("frontend", "cadenza.media"),
    ("server", "cadenza.media"),
)
UNLAWFUL = (
    # upwards, one for each layer
    ("bench", "cadenza.server"),
    ("cli", "cadenza.serve_app"),
    ("engine", "cadenza.cluster"),
    ("server", "cadenza.cli"),
    ("engine", "cadenza.server"),
    ("verification", "cadenza.server"),
    ("frontend", "cadenza.verification"),
    ("loading", "cadenza.frontend"),
    ("engine", "cadenza.loading"),
    ("backends.fake", "cadenza.engine"),
    ("backends.base", "cadenza.backends.fake"),
    ("checkpoint", "cadenza.backends.xla"),
    ("checkpoint", "cadenza.backends.base"),
    ("scheduler", "cadenza.checkpoint"),
    ("vision", "cadenza.checkpoint"),
    ("text", "cadenza.engine"),
    ("media", "cadenza.checkpoint"),
    ("config", "cadenza.scheduler"),
    # siblings
    ("scheduler", "cadenza.text"),
    ("kv", "cadenza.scheduler"),
    ("batch", "cadenza.kv"),
    ("weights", "cadenza.models"),
    ("models", "cadenza.checkpoint"),
    ("engine", "cadenza.models"),
    ("text", "cadenza.scheduler"),
    ("media", "cadenza.text"),
    ("backends.fake", "cadenza.backends.xla"),
    ("backends.xla", "cadenza.backends.mlx"),
    # backends chosen by a string
    ("engine", "cadenza.backends.xla"),
    ("cli", "cadenza.backends.mlx"),
    ("bench", "cadenza.backends.fake"),
    ("backends", "cadenza.backends.xla"),
    # libraries
    ("engine", "jax"),
    ("backends.fake", "jaxlib"),
    ("server", "mlx"),
    ("server", "ray"),
    ("backends.xla", "iree"),
    ("backends.xla", "torch"),
    ("checkpoint", "transformers"),
    ("checkpoint", "pickle"),
    ("request", "numpy"),
    ("scheduler", "scipy"),
    ("scheduler", "time"),
    ("scheduler", "threading"),
    ("scheduler", "random"),
    ("scheduler.scheduler", "numpy"),
    ("text", "numpy"),
    ("media", "numpy"),
    # knowledge
    ("engine.core", "cadenza.text"),
    ("engine", "cadenza.checkpoint"),
    ("engine", "cadenza.outputs"),
    ("engine", "numpy"),
    ("frontend", "cadenza.scheduler"),
    ("frontend", "numpy"),
    ("server", "cadenza.loading"),
    ("server", "cadenza.scheduler"),
    ("server", "numpy"),
    ("bench", "cadenza.scheduler"),
    ("cadenza_bench", "cadenza.scheduler"),
    ("cadenza_bench", "cadenza.server"),
    ("cadenza_bench", "jax"),
    ("cadenza_bench.simulate", "cadenza.text"),
    ("cli", "cadenza_bench"),
    ("server", "cadenza_bench.simulate"),
    ("backends.xla.reference_model", "cadenza.backends.xla"),
    ("backends.xla.reference_model", "cadenza.models.rope_factors"),
)


def lint_tree(root: Path, imports: tuple[tuple[str, str], ...]) -> tuple[int, str]:
    """Exit status and report of the contracts on a tree with these (module, imported) pairs."""
    for package in PACKAGES:
        make_package(root, f"cadenza.{package}" if package else "cadenza")
    for package in LABORATORY:
        make_package(root, package)
    for module in MODULES:
        root.joinpath("cadenza", *module.split(".")).with_suffix(".py").touch()
    for module, imported in imports:
        name = module if module.startswith(LABORATORY) else f"cadenza.{module}"
        path = root.joinpath(*name.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        with path.open("a", encoding="utf-8") as file:
            file.write(f"import {imported}\n")
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    return run_contracts(root)


def make_package(root: Path, name: str) -> None:
    folder = root.joinpath(*name.split("."))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").touch()


def run_contracts(root: Path) -> tuple[int, str]:
    run = subprocess.run(
        [sys.executable, "-c", RUN_CONTRACTS, "--no-cache"],
        cwd=root,
        env={"PYTHONPATH": f"{root}:{REPOSITORY}", "COLUMNS": "200", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return run.returncode, run.stdout + run.stderr


def rejected(report: str) -> set[tuple[str, str]]:
    """The (importer, imported) pairs that a report complains of."""
    chains = re.findall(r"^-?\s+([\w.]+) -> ([\w.]+) \(l\.", report, re.MULTILINE)
    lists = re.findall(r"^([\w.]+) must not import ([\w.]+) \(l\.", report, re.MULTILINE)
    return {(importer.removeprefix("cadenza."), imported) for importer, imported in chains + lists}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    status, text = lint_tree(tmp_path_factory.mktemp("unlawful"), UNLAWFUL)
    assert status == 1, text
    return text


def test_a_tree_that_keeps_the_layers_passes(tmp_path: Path):
    status, text = lint_tree(tmp_path, LAWFUL)
    assert status == 0, text


def test_a_tree_in_which_most_packages_are_still_missing_passes(tmp_path: Path):
    for package in ("cadenza", "cadenza.backends", *LABORATORY):
        make_package(tmp_path, package)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    status, text = run_contracts(tmp_path)
    assert status == 0, text


def test_every_contract_breaks_on_the_unlawful_tree(report: str):
    assert "KEPT" not in report, report
    assert report.count("BROKEN") >= 14


def test_every_unlawful_import_is_named(report: str):
    assert set(UNLAWFUL) - rejected(report) == set(), report


def test_a_circle_of_modules_is_refused(tmp_path: Path):
    circle = (
        ("scheduler.scheduler", "cadenza.scheduler.other"),
        ("scheduler.other", "cadenza.scheduler.scheduler"),
    )
    (tmp_path / "cadenza" / "scheduler").mkdir(parents=True)
    (tmp_path / "cadenza" / "scheduler" / "other.py").touch()
    status, text = lint_tree(tmp_path, circle)
    assert status == 1
    assert "No cycles are allowed in cadenza.scheduler" in text


def test_a_new_package_that_no_layer_names_is_refused(tmp_path: Path):
    (tmp_path / "cadenza" / "helpers").mkdir(parents=True)
    (tmp_path / "cadenza" / "helpers" / "__init__.py").touch()
    status, text = lint_tree(tmp_path, ())
    assert status == 1
    assert "helpers" in text
