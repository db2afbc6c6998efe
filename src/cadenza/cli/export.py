"""`cadenza export` and `quantize`: a folder made of a model, with its step compiled ahead for
`--backend iree`, or with its weights quantised."""

from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from cadenza.cli.options import ModelAndOut, SourceModelFlag
from cadenza.cli.words import model_and_out
from cadenza.errors import ConfigError, show
from cadenza.option import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFlags:
    """What is compiled."""

    max_num_seqs: str = flag(
        "4,8", "Numbers of rows, for each of which there are modules.", metavar="N[,N]"
    )
    max_model_len: int | None = flag(
        None, "Tokens of a context (default: the model's, 4096 at most).", metavar="N"
    )
    dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "The type of weights, activations and KV."
    )
    target: Literal["llvm-cpu", "vulkan-spirv", "cuda"] = flag(
        "llvm-cpu", "What the modules run on; only those for llvm-cpu are served."
    )
    cpu: Literal["generic", "host"] = flag(
        "generic", "Of llvm-cpu: any CPU of this architecture, or those like this machine's."
    )
    revision: str | None = flag(None, "Branch, tag or commit of a hub model.", metavar="NAME")


def export(flags: ExportFlags, words: ModelAndOut, model: SourceModelFlag = None) -> None:
    """Compile a model's step ahead, into a folder that --backend iree serves, without loading JAX.

    Needs IREE's compiler (the extra iree-export).
    """
    from cadenza.backends.exporting import DEFAULT_MAX_MODEL_LEN, ExportOptions, export_folder
    from cadenza.cli.report import bytes_text
    from cadenza.cli.status import status_line
    from cadenza.loading.build import find_checkpoint
    from cadenza.models.towers.reader import VisionOptions

    name, out = model_and_out(words, model)
    num_rows, vision = _rows_of(flags.max_num_seqs), VisionOptions(has_images=False)
    checkpoint = find_checkpoint(name, revision=flags.revision, vision=vision)
    longest = checkpoint.config.max_position_embeddings
    options = ExportOptions(
        num_rows=num_rows,
        max_model_len=flags.max_model_len or min(longest, DEFAULT_MAX_MODEL_LEN),
        dtype=flags.dtype,
        target=flags.target,
        cpu=flags.cpu,
    )
    with status_line("exporting") as report:
        modules = export_folder(checkpoint, out, options, lambda part: report(f"compiling {part}"))
    num_bytes = sum(map(len, modules.files.values()))
    print(f"{out}: {len(modules.files)} modules for {flags.target}, {bytes_text(num_bytes)}")


def _rows_of(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and int(part) for part in parts):
        raise ConfigError(
            f"--max-num-seqs {show(text)} must be numbers of rows from 1, such as 4 or 4,8"
        )
    return tuple(sorted({int(part) for part in parts}))


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
