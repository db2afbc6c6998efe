"""`cadenza quantize`: writes a folder with quantised weights. Computes nothing."""

from pathlib import Path
from typing import Annotated, Literal

import typer

Scheme = Literal["int8", "int4"]


def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's folder or hub id, with float weights.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new or empty folder.")],
    *,
    scheme: Annotated[Scheme, typer.Option(help="How to store the weights of linears.")],
    revision: Annotated[
        str | None, typer.Option(help="The branch, tag or commit of a hub model.")
    ] = None,
) -> None:
    """Write a folder with weights in 8 or 4 bits, as compressed-tensors, which vLLM reads too.

    It gives the same tokens as --quantization with the original folder, and is smaller.
    """
    from cadenza.checkpoint.quantised_folder import write_quantised_folder
    from cadenza.cli.report import progress_bar
    from cadenza.loading.build import find_checkpoint

    checkpoint = find_checkpoint(model, revision=revision)
    with progress_bar(f"quantizing to {scheme}") as report:
        write_quantised_folder(checkpoint, out, scheme, on_progress=report)
    num_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(
        f"{out}: {num_bytes / 1e6:.1f} MB of weights, from {checkpoint.num_weight_bytes / 1e6:.1f}"
    )
