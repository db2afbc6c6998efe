"""`cadenza replay`: compute answers again from their receipts.

Owns the command's flags and what it prints; the comparisons are `verification.replay`'s.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cadenza.cli.options import JsonFlag, ModelFlag
from cadenza.cli.report import json_line, status_line

NOT_EQUAL = 1


def replay(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE…", help="Receipts: JSON, or one a line."),
    ],
    *,
    model: ModelFlag = None,
    json: JsonFlag = False,
) -> int:
    """Compute answers again from their receipts, each alone, and compare every bit.

    The receipt's fingerprint says how: types of activations, weights and KV, arithmetic, context.
    Prints for each receipt that it is equal, or the first token that differs and by how much, or
    the part of the fingerprint that does not fit. Exit code 0 when all are equal, 1 when not.
    """
    from cadenza.verification.replay import read_receipts, replay_receipts

    receipts = [each for file in files for each in read_receipts(Path(file))]
    with status_line("replaying"):
        verdicts = [*replay_receipts(model, receipts)]
    for each in verdicts:
        if json:
            print(json_line({**asdict(each), "is_equal": each.is_equal}))
        elif each.is_equal:
            print(f"{each.source}: equal, {each.num_tokens} tokens")
        else:
            print("\n".join(f"{each.source}: {text}" for text in each.differences))
    return 0 if all(each.is_equal for each in verdicts) else NOT_EQUAL
