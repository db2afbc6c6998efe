"""`cadenza top`: a server's batch in the terminal, while it runs."""

import sys
from typing import Annotated

import typer


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server: http://host:port.")],
    *,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", envvar="CADENZA_API_KEY", show_envvar=False, help="The server's API key."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="One of several models that it serves.")
    ] = None,
) -> None:
    """Show what a running server computes: its rows, pages, queue and speed.

    On a terminal it is one screen: q quits, p pauses the picture, s changes the rows' order.
    Elsewhere it prints a line a second while something is computed.
    """
    from cadenza.cli.top_loop import client_of, print_lines, read_events, show_screens
    from cadenza.cli.top_view import TopState

    with client_of(url, api_key, model) as client:
        state = TopState(url)
        if sys.stdout.isatty() and sys.stdin.isatty():
            show_screens(state, lambda: read_events(client), sys.stdin)
        else:
            print_lines(state, read_events(client), sys.stdout)
