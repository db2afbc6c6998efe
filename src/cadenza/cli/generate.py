"""`cadenza generate`: continue prompts, all of them in one batch. Invariant: what cannot work is
refused before the model is loaded, where that is known.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO, cast

import typer

from cadenza.cli.interrupts import Interrupts
from cadenza.cli.options import EngineFlags, JsonFlag, ModelFlag
from cadenza.cli.sampling_flags import SamplingFlags
from cadenza.cli.words import (
    Prompt,
    PromptsFormat,
    has_model_form,
    model_and_prompts,
    read_piped_prompt,
    read_prompts_file,
)
from cadenza.errors import ConfigError
from cadenza.option import flag
from cadenza.request import PARAMETERS, SamplingParams

if TYPE_CHECKING:
    from cadenza.cli.batch_run import BatchRun, BatchStream, Question
    from cadenza.frontend.loaded_model import LoadedModel, PlannedModel

FAILED = 1
MAX_SHOWN_IDS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFlags:
    """The flags of this command alone."""

    model: ModelFlag = None
    prompts_file: str | None = flag(
        None,
        'More prompts, one a line; - is stdin. In .jsonl files a line is {"prompt": …} with a text '
        "or a list of token ids.",
        metavar="FILE",
    )
    prompts_format: PromptsFormat | None = flag(
        None, "The file's format (default: by the ending of its name)."
    )
    chat: bool = flag(False, "Ask each prompt as a user's message, through the chat template.")
    image: list[str] | None = flag(
        None,
        "An image of each prompt, repeatable: with --chat in front of the message, otherwise where "
        "the prompt has the model's placeholder.",
        metavar="FILE",
    )
    json: JsonFlag = False
    max_tokens: int = flag(64, "Most tokens of an answer.")
    logprobs: int | None = flag(
        None, "With --json: log probabilities of this many likeliest tokens."
    )
    prompt_logprobs: int | None = flag(None, PARAMETERS["prompt_logprobs"].help)
    n: int = flag(1, PARAMETERS["n"].help)
    truncate_prompt_tokens: int | None = flag(None, PARAMETERS["truncate_prompt_tokens"].help)
    receipt: str | None = flag(
        None,
        "Write a receipt of each answer, one a line, which `cadenza replay` recomputes; it has the "
        "prompt's token ids, not its text.",
        metavar="FILE",
    )

    def changes(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "n": self.n,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
        }


def generate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help="All are prompts, but without --model the first one is the model if it is a "
            "folder, a GGUF file or a model of the package, or if it has the form owner/name[:tag] "
            "or name:tag and another follows.",
        ),
    ] = None,
    *,
    flags: GenerateFlags,
    sampling: SamplingFlags,
    config: EngineFlags,
) -> int:
    """Continue prompts, all of them in one batch.

    Without a prompt, what is piped into stdin is one. On a terminal the answers stream side by side
    and a table of times follows; elsewhere each answer is printed when it is done, and nothing
    else. Ctrl-C keeps what was written until then.
    """
    model, prompts = _read_prompts(words or [], flags)
    SamplingParams(**{**sampling.changes(), **flags.changes()})  # refused before a model is opened
    from cadenza.cli.batch_run import BatchRun
    from cadenza.cli.status import progress_bar
    from cadenza.frontend.loaded_model import open_model

    is_live = sys.stdout.isatty() and not flags.json
    with ExitStack() as stack:
        with progress_bar("loading the model") if is_live else nullcontext() as on_progress:
            planned = open_model(model, config, on_progress)
            questions = [_question(planned, prompt, flags, sampling) for prompt in prompts]
            loaded = stack.enter_context(closing(_load_for(planned, questions)))
        fingerprint = loaded.fingerprint
        run = BatchRun(loaded.core, loaded.text, questions, time.perf_counter, fingerprint)
        if flags.receipt is not None:
            stack.callback(_write_receipts, run, stack.enter_context(_open_new(flags.receipt)))
        interrupts = stack.enter_context(Interrupts())
        if is_live:
            run_on_terminal(run, interrupts, loaded.text.defaults.sentence)
        elif flags.json:
            run_as_json(run, interrupts, _facts(model, loaded))
        else:
            run_as_text(run, interrupts)
        return report_failures(run)


def _read_prompts(words: list[str], flags: GenerateFlags) -> tuple[str | None, list[Prompt]]:
    model, texts = model_and_prompts(words, flags.model, has_more=flags.prompts_file is not None)
    if model is None and len(texts) == 1 and has_model_form(texts[0]):
        note = f"{texts[0]!r} is taken as the prompt; a model alone is named by --model"
        print(f"cadenza generate: note: {note}", file=sys.stderr)
    prompts: list[Prompt] = [*texts]
    if flags.prompts_file is not None:
        prompts += read_prompts_file(flags.prompts_file, flags.prompts_format)
    elif flags.prompts_format is not None:
        raise ConfigError("--prompts-format describes --prompts-file; give both or neither")
    if not prompts and sys.stdin is not None and not sys.stdin.isatty():
        piped = read_piped_prompt(sys.stdin)
        prompts += [] if piped is None else [piped]
    if not prompts:
        raise ConfigError("there is no prompt; give at least one, pipe one in, or --prompts-file")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(flags, name) is not None and not flags.json:
            raise ConfigError(f"--{name.replace('_', '-')} needs --json, which prints them; add it")
    if flags.image and any(not isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("--image needs texts; a prompt of token ids has no place for an image")
    if flags.chat and any(not isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("--chat needs texts; a prompt of token ids cannot be asked as a message")
    return model, prompts


def _load_for(planned: "PlannedModel", questions: list["Question"]) -> "LoadedModel":
    """The model with KV pages for the questions, of which as many as have rows run at a time."""
    from cadenza.loading.engine_plan import pages_for_batch, with_pool

    requests = [question.prepared.request for question in questions]
    num_pages = pages_for_batch(requests, planned.plan.limits)
    return replace(planned, plan=with_pool(planned.plan, planned.config, num_pages)).load()


def _question(
    planned: "PlannedModel", prompt: Prompt, flags: GenerateFlags, sampling: SamplingFlags
) -> "Question":
    from cadenza.cli.batch_run import Question
    from cadenza.frontend.prepared_request import AnyPrompt, ChatPrompt, RequestOptions

    given = {**sampling.changes(), **flags.changes()}
    if flags.chat:
        content = _content(cast(str, prompt), flags.image or ())
        asked: AnyPrompt = ChatPrompt(messages=[{"role": "user", "content": content}])
    elif flags.image:
        files = [Path(file) for file in flags.image]
        asked = {"prompt": prompt, "multi_modal_data": {"image": files}}
    else:
        asked = prompt
    options = RequestOptions(has_receipt=flags.receipt is not None)
    prepared = planned.text.prepare(asked, given, options)
    if isinstance(prompt, str):
        return Question(shown=prompt, prepared=prepared)
    listed = ", ".join(map(str, prompt[:MAX_SHOWN_IDS]))
    more = ", …" if len(prompt) > MAX_SHOWN_IDS else ""
    return Question(shown=f"[{listed}{more}]", prepared=prepared)


def _content(prompt: str, files: Sequence[str]) -> str | list[dict[str, Any]]:
    from cadenza.frontend.image_prompts import image_input
    from cadenza.media.image_input import image_part

    if not files:
        return prompt
    images = [image_part(image_input(Path(file), f"--image {file}")) for file in files]
    return [*images, {"type": "text", "text": prompt}]


def _open_new(name: str) -> TextIO:
    """The file for receipts, before anything is computed. Raises ConfigError."""
    try:
        return Path(name).open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--receipt {name} cannot be written: {error.strerror}; name a file in a folder of "
            f"yours"
        ) from error


def _write_receipts(run: "BatchRun", file: TextIO) -> None:
    """A line for each answer that has ended, also after Ctrl-C."""
    import msgspec

    for stream in run.streams:
        for completion in stream.completions:
            if completion.receipt is not None:
                file.write(msgspec.json.encode(completion.receipt).decode() + "\n")


def _facts(model: str | None, loaded: "LoadedModel") -> dict[str, str]:
    traits = loaded.plan.traits
    return {
        "model": model or "bundled",
        "dtype": loaded.plan.dtype,
        "backend": traits.name,
        "exactness": traits.exactness,
    }


def _steps(run: "BatchRun", interrupts: Interrupts) -> Iterator[list["BatchStream"]]:
    """Runs to the end; Ctrl-C ends it between two steps."""
    while not run.is_done:
        if interrupts.is_set:
            run.close()
            raise KeyboardInterrupt
        yield run.step()


def _steps_with_progress(run: "BatchRun", interrupts: Interrupts) -> Iterator[list["BatchStream"]]:
    """As `_steps`, with a line on stderr if that is a terminal."""
    from cadenza.frontend.progress import progress_line

    with progress_line(run.num_requests) as line:
        for news in _steps(run, interrupts):
            if line.is_due:
                line.show(
                    num_done=sum(stream.is_finished for stream in run.streams),
                    num_rows=len(run.core.scheduler.running),
                    num_tokens=run.num_tokens,
                )
            yield news


def run_as_text(run: "BatchRun", interrupts: Interrupts) -> None:
    """Prints each answer when it is finished; after Ctrl-C also those that had begun."""
    from cadenza.cli.generate_view import block

    left = list(run.streams)

    def show(streams: list["BatchStream"]) -> None:
        for stream in streams:
            left.remove(stream)
            print(block(stream, len(run.streams)), end="", flush=True)

    try:
        for news in _steps_with_progress(run, interrupts):
            show([stream for stream in news if stream.is_finished])
    except KeyboardInterrupt:
        show([stream for stream in left if stream.text])
        raise


def run_as_json(run: "BatchRun", interrupts: Interrupts, facts: dict[str, str]) -> None:
    """Prints an object for each sample at the end, also after Ctrl-C."""
    from cadenza.cli.generate_view import json_lines

    try:
        for _ in _steps_with_progress(run, interrupts):
            pass
    finally:
        for line in json_lines(run, facts):
            print(line)


def run_on_terminal(run: "BatchRun", interrupts: Interrupts, sampling: str) -> None:
    """Shows the streams side by side; at the end, and after Ctrl-C, the answers and a table."""
    from rich.console import Console

    from cadenza.cli.generate_view import live_view, print_result

    console = Console(highlight=False)
    try:
        with live_view(run, console, time.perf_counter) as frames:
            frames.draw()
            for _ in _steps(run, interrupts):
                frames.draw()
    finally:
        print_result(run, console)
        console.print(f"sampling where no flag sets it: {sampling}", style="dim", soft_wrap=True)


def report_failures(run: "BatchRun") -> int:
    """The exit code: 1 when a stream failed, with a line on stderr for each that did."""
    from cadenza.cli.generate_view import failure

    failures = [text for stream in run.streams if (text := failure(stream)) is not None]
    for text in failures:
        print(f"cadenza generate: error: {text}", file=sys.stderr)
    return FAILED if failures else 0
