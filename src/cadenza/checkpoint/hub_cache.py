"""The models in the hub's local cache: `HubCache` lists and removes them. Other tools share the
cache: only what is named is removed; files that another revision has too stay."""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cadenza.errors import CheckpointError, InvalidRequestError

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

_MAIN = Path("refs", "main")
_SNAPSHOTS = "snapshots"
_CACHED = "models--"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REF_BYTES = 256
_MAX_SNAPSHOTS = 1000

SHORTEST_COMMIT = 6  # digits of a commit that identify it


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """One revision of a model in the cache. `refs` are the branches and tags that it is."""

    model: str
    commit: str
    refs: tuple[str, ...]
    num_files: int
    size_bytes: int
    used_at: float
    path: Path

    def is_called(self, revision: str) -> bool:
        """Whether `revision` is its branch, its tag, or the start of its commit."""
        is_start = len(revision) >= SHORTEST_COMMIT and self.commit.startswith(revision)
        return revision in self.refs or is_start


@dataclass(frozen=True, slots=True, kw_only=True)
class HubCache:
    """The cache in `folder`; None is huggingface_hub's own (`HF_HUB_CACHE`)."""

    folder: Path | None = None

    def models(self) -> list[CachedModel]:
        """All revisions of all models, by name, the most recently used first."""
        info = self._scan()
        found = [
            CachedModel(
                model=repo.repo_id,
                commit=revision.commit_hash,
                refs=tuple(sorted(revision.refs)),
                num_files=revision.nb_files,
                size_bytes=revision.size_on_disk,
                used_at=repo.last_accessed,
                path=revision.snapshot_path,
            )
            for repo in (() if info is None else info.repos)
            if repo.repo_type == "model"
            for revision in repo.revisions
        ]
        return sorted(found, key=lambda each: (each.model, -each.used_at, each.commit))

    def chosen(self, name: str, revision: str | None = None) -> list[CachedModel]:
        """The revisions of the model `name`, or the one called `revision`. Raises
        InvalidRequestError if the cache has none, or the start of a commit fits several."""
        model, _, selector = name.partition(":")
        if selector:
            raise InvalidRequestError(
                f"{name!r} names one file of {model}; whole revisions are removed: leave "
                f":{selector} out"
            )
        models = self.models()
        mine = [each for each in models if each.model == model]
        if not mine:
            known = {each.model for each in models}
            near = get_close_matches(model, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else "; `cadenza list` shows what it has"
            raise InvalidRequestError(f"the cache has no model {model!r}{hint}")
        if revision is None:
            return mine
        found = [each for each in mine if each.is_called(revision)]
        if len(found) != 1:
            have = ", ".join("/".join((*each.refs, each.commit[:12])) for each in mine)
            fault = "several revisions" if found else "no revision"
            raise InvalidRequestError(
                f"{model} has {fault} {revision!r} in the cache; it has {have}"
            )
        return found

    def freed_bytes(self, models: list[CachedModel]) -> int:
        """What removing them frees on the disk."""
        return self._strategy(models).expected_freed_size

    def remove(self, models: list[CachedModel]) -> None:
        """Raises CheckpointError if a revision is still there afterwards."""
        self._strategy(models).execute()
        left = [each for each in models if each.path.exists()]
        if left:
            raise CheckpointError(f"{left[0].path} cannot be removed; check its permissions")

    def _strategy(self, models: list[CachedModel]) -> Any:
        info = self._scan()
        assert info is not None, "models of a cache that is not there"
        return cast(Any, info).delete_revisions(*(each.commit for each in models))

    def _scan(self) -> "HFCacheInfo | None":
        from huggingface_hub import scan_cache_dir
        from huggingface_hub.errors import CacheNotFound

        try:
            return scan_cache_dir(self.folder)
        except CacheNotFound:
            return None
        except ValueError as error:  # a file in the folder's place
            raise CheckpointError(f"the hub's cache cannot be read: {error}") from error


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


def _read_ref(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            commit = file.read(_MAX_REF_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return commit if _COMMIT.fullmatch(commit) else None
