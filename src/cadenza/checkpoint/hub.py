"""Downloads model folders and GGUF files from the Hugging Face hub: `Hub.fetch`. A name may end
with a selector of one of the repository's GGUF models: `owner/model:Q4_K_M`. A revision is
resolved once and all files of a snapshot are of that commit; files that may contain code (`.py`,
`.bin`, `.pt`) are never downloaded."""

import errno
import itertools
import os
import re
import selectors
import socket
import sys
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from cadenza.checkpoint.gguf.files import (
    choose_gguf,
    choose_projector,
    first_files,
    split_names,
)
from cadenza.checkpoint.tokenizer_files import NAMED_TEMPLATES_FOLDER
from cadenza.errors import CheckpointError, show_size
from cadenza.json_object import read_json_object
from cadenza.models.config_json import CONFIG_FILE, parse_model_config
from cadenza.text.tokens.tokenizer import MAX_TOKENIZER_BYTES
from cadenza.weights.safetensors_file import INDEX_FILE, MTP_FILE, SINGLE_FILE
from cadenza.weights.weights import read_shard_names

if TYPE_CHECKING:
    from huggingface_hub import HfApi


DEFAULT_REVISION = "main"
MAX_SMALL_FILES = 100
MAX_CACHED = 10_000

_ID = re.compile(r"(?!.*(\.\.|--))[\w][\w.-]{0,95}/[\w][\w.-]{0,95}", re.ASCII)
_SELECTOR = re.compile(r"\w[\w.-]{0,95}", re.ASCII)
_GGUF_PATH = re.compile(r"(\w[\w .+-]*/)*\w[\w .+-]*\.gguf", re.ASCII | re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"(?!.*\.\.)\w[\w./+-]{0,254}", re.ASCII)
_SMALL_FILES = frozenset(
    "1_Pooling/config.json modules.json "
    "chat_template.jinja chat_template.json config.json generation_config.json "
    "model.safetensors.index.json special_tokens_map.json tokenizer.json "
    "tokenizer_config.json preprocessor_config.json processor_config.json".split()
)
_NAMED_TEMPLATE = re.compile(re.escape(NAMED_TEMPLATES_FOLDER) + r"/[\w.-]+\.jinja", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form `owner/model`, or `owner/model:selector`."""
    model, _, selector = name.partition(":")
    is_selector = _SELECTOR.fullmatch(selector) is not None or ":" not in name
    return _ID.fullmatch(model) is not None and is_selector


def print_to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The folder of one commit of a repository, and the GGUF file that is the model, if any."""

    folder: Path
    commit: str
    gguf: Path | None = None

    @property
    def path(self) -> Path:
        return self.gguf or self.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """The hub and its local cache; None takes huggingface_hub's environment variables. `any_family`
    fetches models of unknown families too, as in `open_checkpoint`; `has_images` fetches the tower
    of a GGUF model, if there is one. `report` is called with a line for each file, unless stderr is
    a terminal with progress bars."""

    endpoint: str | None = None
    cache: Path | None = None
    is_offline: bool | None = None
    report: Callable[[str], None] = print_to_stderr
    any_family: bool = False
    has_images: bool = True

    def fetch(self, name: str, revision: str | None = None) -> Snapshot:
        """Downloads what is missing of the model `name` at `revision` (branch, tag or commit). A
        repository with safetensors weights gives its folder, unless `name` has a selector. Raises
        CheckpointError if the model or revision does not exist, access is denied, the model is not
        supported, or the hub is unreachable and the cache incomplete."""
        if not is_hub_id(name) or not _REVISION.fullmatch(revision or DEFAULT_REVISION):
            raise CheckpointError(
                f"{name[:200]!r} at revision {(revision or DEFAULT_REVISION)[:200]!r} is not a hub "
                f"id; write owner/model, or owner/model:Q4_K_M for one of its GGUF files, and a "
                f"branch, a tag or a commit"
            )
        return _Fetching.of(self, name, revision or DEFAULT_REVISION).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fetching:
    """One call of `fetch`, with the hub's settings resolved."""

    hub: Hub
    name: str
    selector: str | None
    revision: str
    endpoint: str
    cache: Path

    @classmethod
    def of(cls, hub: Hub, name: str, revision: str) -> "_Fetching":
        from huggingface_hub import constants

        model, _, selector = name.partition(":")
        return cls(
            hub=hub,
            name=model,
            selector=selector or None,
            revision=revision,
            endpoint=hub.endpoint or constants.ENDPOINT,
            cache=hub.cache or Path(constants.HF_HUB_CACHE),
        )

    @property
    def storage(self) -> Path:
        return self.cache / f"models--{self.name.replace('/', '--')}"

    def run(self) -> Snapshot:
        from huggingface_hub import constants

        is_offline = self.hub.is_offline
        if constants.HF_HUB_OFFLINE if is_offline is None else is_offline:
            return self._find_cached()
        self._check_reach()
        with self._explained():
            from huggingface_hub import HfApi

            api = HfApi(endpoint=self.endpoint)
            found = api.model_info(self.name, revision=self.revision, files_metadata=True)
        commit = found.sha or ""
        if not _COMMIT.fullmatch(commit):
            raise CheckpointError(
                f"the hub at {self.endpoint} returned no commit for {self._subject}; check "
                f"HF_ENDPOINT"
            )
        sizes = {each.rfilename: each.size or 0 for each in found.siblings or []}
        gguf = self._choose_gguf(sizes)
        file = None if gguf is None else self._fetch_gguf(api, commit, gguf, sizes)
        folder = self._fetch_files(api, commit, sizes) if file is None else file.parent
        self._remember(commit)
        return Snapshot(folder=folder, commit=commit, gguf=file)

    def _check_reach(self) -> None:
        limit_s = connect_limit_s()
        if is_silent(self.endpoint, limit_s):
            raise CheckpointError(
                f"the hub at {self.endpoint} does not answer within {limit_s:g} s for "
                f"{self._subject}: the network drops what is sent; check it, set HF_HUB_OFFLINE=1 "
                f"to use the cache, name a local folder, or set {LIMIT_VARIABLE} to wait longer"
            )

    @property
    def _subject(self) -> str:
        return f"the hub model {self.name} at revision {self.revision}"

    def _choose_gguf(self, names: Collection[str]) -> str | None:
        """None for a folder with safetensors weights."""
        has_weights = CONFIG_FILE in names and bool({SINGLE_FILE, INDEX_FILE} & {*names})
        safe = [name for name in names if _GGUF_PATH.fullmatch(name)]
        if self.selector is None and (has_weights or not first_files(safe)):
            return None
        return choose_gguf(safe, self.selector, where=self._subject, model=self.name)

    def _fetch_gguf(self, api: "HfApi", commit: str, name: str, sizes: Mapping[str, int]) -> Path:
        """All files of a GGUF model, and that of its tower; returns the first."""
        folder, slash, file = name.rpartition("/")
        names = [f"{folder}{slash}{each}" for each in split_names(file)]
        absent = [each for each in names if each not in sizes]
        if absent:
            raise CheckpointError(
                f"{self._subject} has no {absent[0]}, which {name} needs; choose another file"
            )
        first = self._download_all(api, commit, names, sizes)
        projector = choose_projector(sizes, name) if self.hub.has_images else None
        if projector is not None:
            self._download(api, commit, projector, sizes)
        return first

    def _fetch_files(self, api: "HfApi", commit: str, sizes: Mapping[str, int]) -> Path:
        """Small files first, to refuse unsupported models before fetching weights."""
        small = [path for path in sizes if path in _SMALL_FILES or _NAMED_TEMPLATE.fullmatch(path)]
        too_large = [path for path in small if sizes[path] > MAX_TOKENIZER_BYTES]
        if CONFIG_FILE not in small or too_large or len(small) > MAX_SMALL_FILES:
            fault = f"has no {CONFIG_FILE}"
            if too_large:
                fault = f"has a {too_large[0]} of {show_size(sizes[too_large[0]])}"
            elif len(small) > MAX_SMALL_FILES:
                fault = f"has {len(small)} templates and settings"
            raise CheckpointError(
                f"{self._subject} {fault}; supported are repositories in the layout of "
                f"transformers, with small files of at most {show_size(MAX_TOKENIZER_BYTES)}"
            )
        folder = self._download(api, commit, CONFIG_FILE, sizes).parent
        if not self.hub.any_family:
            parse_model_config(read_json_object(folder / CONFIG_FILE).values)
        for path in sorted(small):
            self._download(api, commit, path, sizes)
        self._download_all(api, commit, self._weight_files(folder, sizes), sizes)
        return folder

    def _weight_files(self, folder: Path, sizes: Mapping[str, int]) -> list[str]:
        wanted = [SINGLE_FILE]
        if SINGLE_FILE not in sizes and INDEX_FILE in sizes:
            wanted = read_shard_names(folder)
        absent = [path for path in wanted if path not in sizes]
        if absent:
            others = sorted(path for path in sizes if path.endswith((".bin", ".pt", ".pth")))[:3]
            found = f"; it has {', '.join(others)}, which are not supported" if others else ""
            raise CheckpointError(
                f"{self._subject} has no {', '.join(absent[:3])}{found}; choose a model with "
                f"safetensors weights"
            )
        if wanted == [SINGLE_FILE] and MTP_FILE in sizes:
            wanted.append(MTP_FILE)
        return wanted

    def _download_all(
        self, api: "HfApi", commit: str, paths: list[str], sizes: Mapping[str, int]
    ) -> Path:
        fetched = [
            self._download(api, commit, path, sizes, progress=f"{number} of {len(paths)}: ")
            for number, path in enumerate(paths, start=1)
        ]
        return fetched[0]

    def _download(
        self, api: "HfApi", commit: str, path: str, sizes: Mapping[str, int], progress: str = ""
    ) -> Path:
        is_shown = sys.stderr.isatty()
        target = self.storage / "snapshots" / commit / path
        if not is_shown and not target.exists():
            self.hub.report(f"fetching {progress}{path} ({show_size(sizes[path])})")
        download = cast(Callable[..., str], api.hf_hub_download)  # pyright: ignore[reportUnknownMemberType]
        with self._explained():
            fetched = download(
                self.name,
                path,
                revision=commit,
                cache_dir=self.cache,
                tqdm_class=None if is_shown else _silent_bar(),
            )
        return Path(fetched)

    def _remember(self, commit: str) -> None:
        """Stores the revision's commit in the cache (refs/), for offline starts."""
        if _COMMIT.fullmatch(self.revision):
            return
        path = self.storage / "refs" / self.revision
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(commit, encoding="ascii")
        except OSError:
            self.hub.report(
                f"cannot write to the cache; {self.revision} cannot be resolved when offline"
            )

    def _find_cached(self) -> Snapshot:
        ref = self.storage / "refs" / self.revision
        commit = self.revision
        if not _COMMIT.fullmatch(commit):
            commit = ref.read_text(encoding="ascii")[:41].strip() if ref.is_file() else ""
        folder = self.storage / "snapshots" / commit
        missing = [] if _COMMIT.fullmatch(commit) and folder.is_dir() else ["all of it"]
        gguf = None if missing else self._choose_gguf(_cached_names(folder))
        if gguf is not None:
            file = folder / gguf
            missing = [name for name in split_names(file.name) if not (file.parent / name).exists()]
        elif not missing:
            missing = [name for name in _needed_files(folder) if not (folder / name).exists()]
        if missing:
            raise CheckpointError(
                f"HF_HUB_OFFLINE is set and the cache lacks {', '.join(missing[:4])} of "
                f"{self._subject}; fetch it once with a network, or name a local folder"
            )
        return Snapshot(folder=folder, commit=commit, gguf=None if gguf is None else folder / gguf)

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Turns huggingface_hub's errors into CheckpointError."""
        try:
            yield
        except Exception as error:  # includes errors of the library's HTTP client
            raise CheckpointError(self._explain(error)) from error

    def _explain(self, error: Exception) -> str:
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            return (
                f"{self._subject} is gated; accept its terms on its page, then log in with "
                f"`hf auth login` or set HF_TOKEN"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"the hub model {self.name} has no revision {self.revision}; check --revision"
        if isinstance(error, errors.RepositoryNotFoundError):
            return (
                f"there is no model {self.name} on the hub at {self.endpoint}, or it is private; "
                f"check the name, or log in with `hf auth login` or HF_TOKEN"
            )
        if isinstance(error, errors.HfHubHTTPError):
            status = error.response.status_code
            return f"the hub at {self.endpoint} returned {status} for {self._subject}; try later"
        if isinstance(error, OSError) and error.strerror:
            return f"{self._subject} cannot be written to the cache: {error.strerror}"
        return (
            f"the hub at {self.endpoint} cannot be reached for {self._subject} "
            f"({type(error).__name__}); check the network, set HF_HUB_OFFLINE=1 to use the cache, "
            f"or name a local folder"
        )


def _cached_names(folder: Path) -> list[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return [path.relative_to(folder).as_posix() for path in itertools.islice(found, MAX_CACHED)]


def _needed_files(folder: Path) -> list[str]:
    if (folder / SINGLE_FILE).exists() or not (folder / INDEX_FILE).exists():
        return [CONFIG_FILE, SINGLE_FILE]
    return [CONFIG_FILE, *read_shard_names(folder)]


def _silent_bar() -> type[Any]:
    from tqdm import tqdm

    def start_disabled(bar: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)
        cast(Any, tqdm).__init__(bar, *args, **{**kwargs, "disable": True})

    return type("SilentBar", (tqdm,), {"__init__": start_disabled})


CONNECT_S = 1.1  # a packet that was lost is sent again after a second
LIMIT_VARIABLE = "HF_HUB_ETAG_TIMEOUT"
MAX_ADDRESSES = 8
PORTS = {"http": 80, "https": 443}

Resolve = Callable[..., list[Any]]


def connect_limit_s() -> float:
    """huggingface_hub's variable, or `CONNECT_S`."""
    try:
        return float(os.environ[LIMIT_VARIABLE])
    except (KeyError, ValueError):
        return CONNECT_S


def is_silent(endpoint: str, limit_s: float, resolve: Resolve = socket.getaddrinfo) -> bool:
    """Whether a network drops what is sent to the hub, found before its client waits ten seconds
    for each address, and for names as long as the system does. The limit is of the name, every
    address and the proxy together; an error that comes in time is left to the client."""
    hop = _first_hop(endpoint)
    if hop is None:
        return False
    end_s = time.monotonic() + limit_s
    found: SimpleQueue[list[Any]] = SimpleQueue()

    def look_up() -> None:
        try:
            found.put(resolve(*hop, type=socket.SOCK_STREAM))
        except OSError:
            found.put([])

    Thread(target=look_up, daemon=True, name="hub-name").start()
    try:
        addresses = found.get(timeout=limit_s)
    except Empty:
        return True
    return _is_silent(addresses[:MAX_ADDRESSES], end_s)


def _first_hop(endpoint: str) -> tuple[str, int] | None:
    """Host and port of the proxy, or of the hub; None where the client has to say what is wrong."""
    try:
        parts = urlsplit(endpoint)
        host = parts.hostname or ""
        named = {} if not host or proxy_bypass(host) else getproxies()
        proxy = named.get(parts.scheme) or named.get("all")
        if proxy is not None:
            parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        port = parts.port or PORTS.get(parts.scheme)
    except ValueError:
        return None
    return (parts.hostname, port) if parts.hostname and port else None


def _is_silent(addresses: list[Any], end_s: float) -> bool:
    """Whether none is connected in time, and not all failed: all are tried together."""
    with ExitStack() as opened, selectors.DefaultSelector() as waiting:
        for family, kind, protocol, _, address in addresses:
            try:
                tried = opened.enter_context(socket.socket(family, kind, protocol))
            except OSError:  # a family that this machine lacks
                continue
            tried.setblocking(False)
            error = tried.connect_ex(address)
            if error == 0:
                return False
            if error == errno.EINPROGRESS:
                waiting.register(tried, selectors.EVENT_WRITE)
        while waiting.get_map():
            ready = waiting.select(max(0.0, end_s - time.monotonic()))
            if not ready:
                return True
            for key, _ in ready:
                tried = cast(socket.socket, key.fileobj)
                if not tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    return False
                waiting.unregister(tried)
    return False
