"""Folders that are no model themselves: the hub's cache of one, and LoRA adapters. Reads small
files only."""

import re
from pathlib import Path

from cadenza.errors import CheckpointError
from cadenza.json_object import read_json_object, shorten

ADAPTER_FILE = "adapter_config.json"
MERGE = "merge it into its base (peft's `merge_and_unload`) and name the result, or name the base"

_MAIN = Path("refs", "main")
_SNAPSHOTS = "snapshots"
_CACHED = "models--"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES = 256
_MAX_SNAPSHOTS = 1000


def main_snapshot(folder: Path) -> Path:
    """The snapshot of the branch `main` in a folder of the hub's cache, `models--owner--name`; any
    other folder is itself. Raises CheckpointError if such a folder has no snapshot of `main`, and
    not just one."""
    name = folder.absolute().name
    if not name.startswith(_CACHED) or not (folder / _SNAPSHOTS).is_dir():
        return folder
    snapshots = folder / _SNAPSHOTS
    commit = _read_ref(folder / _MAIN)
    if commit is not None and (snapshots / commit).is_dir():
        return snapshots / commit
    try:
        names = [each.name for each in snapshots.iterdir() if each.is_dir()][:_MAX_SNAPSHOTS]
    except OSError:
        names = []
    if len(names) == 1:
        return snapshots / names[0]
    found = "has no snapshot" if not names else f"has {len(names)} snapshots and none of main"
    raise CheckpointError(
        f"the folder {name} of the hub's cache {found}; name the model as "
        f"{name.removeprefix(_CACHED).replace('--', '/')}, or one of the folders in {_SNAPSHOTS}/"
    )


def adapter_in(folder: Path) -> str | None:
    """The error text for a folder with a LoRA adapter; None for any other."""
    if not (folder / ADAPTER_FILE).is_file():
        return None
    try:
        base = read_json_object(folder / ADAPTER_FILE).get("base_model_name_or_path")
    except CheckpointError:
        base = None
    return adapter_text(f"the folder {folder.name}", base)


def adapter_text(what: str, base: object) -> str:
    """The error for `what`, an adapter of the model `base`, if that is known."""
    of = f" of {shorten(base)}" if isinstance(base, str) and base else ""
    return f"{what} is a LoRA adapter{of}, which is no model by itself; {MERGE}"


def _read_ref(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            commit = file.read(_MAX_REF_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return commit if _COMMIT.fullmatch(commit) else None
