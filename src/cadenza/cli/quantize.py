"""`cadenza quantize`: writes a folder with quantised weights. Computes nothing."""

from typing import Annotated, Literal

import typer

from cadenza.cli.model_words import model_and_out
from cadenza.cli.options import ModelAndOut, SourceModelFlag

Scheme = Literal["int8", "int4"]


def quantize(
    words: ModelAndOut,
    *,
    quantization: Annotated[
        Scheme,
        typer.Option("--quantization", "--scheme", help="How to store the weights of linears."),
    ],
    model: SourceModelFlag = None,
    revision: Annotated[
        str | None, typer.Option(help="The branch, tag or commit of a hub model.")
    ] = None,
) -> None:
    """Write a folder with weights in 8 or 4 bits, as compressed-tensors, which vLLM reads too.

    It gives the same tokens as --quantization with the original folder, and is smaller.
    """
    from cadenza.checkpoint.quantised_folder import write_quantised_folder
    from cadenza.cli.report import bytes_text
    from cadenza.cli.status import progress_bar
    from cadenza.loading.build import find_checkpoint

    name, out = model_and_out(words, model)
    checkpoint = find_checkpoint(name, revision=revision)
    with progress_bar(f"quantizing to {quantization}") as report:
        write_quantised_folder(checkpoint, out, quantization, on_progress=report)
    num_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    was = bytes_text(checkpoint.num_weight_bytes)
    print(f"{out}: {bytes_text(num_bytes)} of weights, from {was}")
