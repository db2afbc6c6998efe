"""The `cadenza` command and its subcommands.

Invariant: building the app imports nothing heavy.
"""

from typing import Annotated

import typer

import cadenza
from cadenza.cli.bench import build_bench
from cadenza.cli.cached_models import list_command, pull, rm
from cadenza.cli.chat import chat, run
from cadenza.cli.doctor import doctor
from cadenza.cli.export import export, quantize
from cadenza.cli.generate import generate
from cadenza.cli.info import info
from cadenza.cli.options import with_flags
from cadenza.cli.serve import serve
from cadenza.cli.top import top
from cadenza.cli.verify import replay, verify_command

EPILOG = (
    "Engine flags can also be set in the environment: --max-num-seqs as CADENZA_MAX_NUM_SEQS, and "
    "so on, or in a TOML file (--config); a flag comes first, then its variable. Exit codes: 0 "
    "done, 1 a check or a request failed, 2 wrong use or, of serve, a server that cannot come up, "
    "3 could not load, 4 verify found every bit equal and could not show all that it should."
)

NO_COMMAND = 2


def build_app() -> typer.Typer:
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(epilog=EPILOG, invoke_without_command=True)(_cadenza)
    for command in (serve, generate, run, chat, info, verify_command, replay):
        name = command.__name__.removesuffix("_command")
        app.command(name, epilog=EPILOG)(with_flags(command))
    app.command("quantize", epilog=EPILOG)(quantize)
    app.command("export", epilog=EPILOG)(with_flags(export))
    app.command("doctor", epilog=EPILOG)(doctor)
    for command in (list_command, pull, rm, top):
        app.command(command.__name__.removesuffix("_command"))(command)
    app.add_typer(build_bench(EPILOG), name="bench")
    app.command("version")(_version)
    return app


def _version() -> None:
    """Show the version, and the commit and platform of the build."""
    from cadenza.build_record import read_build

    build = ", ".join(f"{key} {value}" for key, value in read_build().items() if key != "compiler")
    typer.echo(f"cadenza {cadenza.__version__} ({build or 'a source tree'})")


def _print_version(asked: bool) -> None:
    if asked:
        _version()
        raise typer.Exit


def _cadenza(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Continuous-batching inference in which every stream is exactly what it would be alone."""
    if context.invoked_subcommand is None and not version:
        typer.echo(context.get_help())
        raise typer.Exit(NO_COMMAND)
