"""`cadenza top`: a server's batch in the terminal, while it runs."""

import sys
from typing import Annotated

import typer

from cadenza.cli.options import ApiKeyFlag, CaCertFlag
from cadenza.server_link import ServerLink


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server: http://host:port.")],
    *,
    api_key: ApiKeyFlag = None,
    cacert: CaCertFlag = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="One of several models that it serves.")
    ] = None,
) -> None:
    """Show what a running server computes: its rows, pages, queue and speed.

    On a terminal it is one screen: q quits, p pauses the picture, s changes the rows' order.
    Elsewhere it prints a line a second while something is computed.
    """
    from cadenza.cli.top_view import TopState, client_of, print_lines, read_events, show_screens

    link = ServerLink(url=url, api_key=api_key, cacert=cacert)
    with client_of(link, model) as client:
        state = TopState(url)
        if sys.stdout.isatty() and sys.stdin.isatty():
            show_screens(state, lambda: read_events(link, client), sys.stdin)
        else:
            print_lines(state, read_events(link, client), sys.stdout)
