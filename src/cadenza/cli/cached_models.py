"""`cadenza list`, `pull` and `rm`: the models in the hub's cache. Invariant: nothing is removed
that was not agreed to, by an answer or by --yes.
"""

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from cadenza.cli.options import JsonFlag
from cadenza.cli.report import Column, as_table, bytes_text, counted, json_line, print_table
from cadenza.cli.words import YES_OR_NO, yes_or_no
from cadenza.errors import InvalidRequestError

if TYPE_CHECKING:
    from cadenza.checkpoint.hub_cache import CachedModel

NOT_REMOVED = 1
SHOWN_DIGITS = 12

RevisionFlag = Annotated[
    str | None, typer.Option("--revision", metavar="NAME", help="A branch, a tag or a commit.")
]


def _called(model: "CachedModel") -> str:
    return ", ".join(model.refs) or model.commit[:SHOWN_DIGITS]


COLUMNS = (
    Column("model", "model"),
    Column("revision", "revision", read=_called),
    Column("size_bytes", "size"),
    Column("num_files", "files"),
    Column("used_at", "last used", show=lambda at: time.strftime("%Y-%m-%d", time.localtime(at))),
)


def list_command(*, json: JsonFlag = False) -> None:
    """List the models in the hub's cache, and their sizes."""
    from cadenza.checkpoint.hub_cache import HubCache

    models = HubCache().models()
    if json:
        for each in models:
            print(json_line(_as_object(each)))
    elif models:
        print_table(as_table(COLUMNS, models))
    else:
        print("The hub's cache has no models; `cadenza pull owner/model` fetches one.")


def pull(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A hub id: owner/model, or owner/model:Q4_K_M.")
    ],
    *,
    revision: RevisionFlag = None,
    json: JsonFlag = False,
) -> None:
    """Fetch a model into the hub's cache.

    A later start then needs no network. Only the files that an engine reads are fetched, and those
    that the cache lacks.
    """
    from cadenza.checkpoint.hub import Hub

    found = Hub().fetch(model, revision)
    if json:
        print(json_line({"model": model, "commit": found.commit, "path": str(found.path)}))
    else:
        print(f"{model}: commit {found.commit[:SHOWN_DIGITS]}, in {found.path}")


def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="MODEL…", help="Hub ids, as `cadenza list` shows them.")
    ],
    *,
    revision: RevisionFlag = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: JsonFlag = False,
) -> int:
    """Remove models from the hub's cache: all their revisions, or one.

    Asks before it does. Exit code 1: the answer was no.
    """
    from cadenza.checkpoint.hub_cache import HubCache

    if revision is not None and len(names) > 1:
        raise InvalidRequestError(f"--revision is of one model; {len(names)} are named")
    cache = HubCache()
    chosen = [each for name in dict.fromkeys(names) for each in cache.chosen(name, revision)]
    freed = cache.freed_bytes(chosen)
    if not (yes or is_agreed(chosen, freed, sys.stdin)):
        print("Nothing is removed.", file=sys.stderr)
        return NOT_REMOVED
    cache.remove(chosen)
    if json:
        for each in chosen:
            print(json_line(_as_object(each)))
    else:
        print(f"Removed {counted(len(chosen), 'revision')}: {bytes_text(freed)} are free.")
    return 0


def is_agreed(chosen: "list[CachedModel]", freed: int, answers: TextIO) -> bool:
    """Asks on stderr. Raises InvalidRequestError where nobody can be asked."""
    if not answers.isatty():
        raise InvalidRequestError(
            "stdin is no terminal, so that nobody can be asked; give --yes to remove"
        )
    for each in chosen:
        print(f"{each.model} ({_called(each)}), {bytes_text(each.size_bytes)}", file=sys.stderr)
    while True:
        ask = f"Remove, which frees {bytes_text(freed)}? [y/N] "
        print(ask, end="", file=sys.stderr, flush=True)
        found = yes_or_no(answers.readline(), default=False)
        if found is not None:
            return found
        print(YES_OR_NO, file=sys.stderr)


def _as_object(model: "CachedModel") -> dict[str, object]:
    return {**asdict(model), "path": str(model.path)}
