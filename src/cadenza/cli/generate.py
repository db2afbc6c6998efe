"""`cadenza generate`: continue prompts, all of them in one batch.

Owns the command's flags and the choice among its three forms of output. Knows the batch through
`BatchRun`. Invariant: what cannot work is said before the model is loaded, where it can be known.
"""

import sys
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cadenza.cli.interrupts import Interrupts
from cadenza.cli.options import JsonFlag, ModelFlag
from cadenza.cli.prompts import (
    Prompt,
    PromptsFormat,
    read_piped_prompt,
    read_prompts_file,
    read_words,
)
from cadenza.cli.sampling_flags import SamplingFlags
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError

if TYPE_CHECKING:
    from cadenza.cli.batch_run import BatchRun, Question, Stream
    from cadenza.frontend.loaded_model import LoadedModel

FAILED = 1
SHOWN_IDS = 12

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL|PROMPT",
        show_default=False,
        help="The first word is the model's folder if it is a folder with a config.json and "
        "--model is not given; all others are prompts.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateFlags:
    """The flags of this command alone."""

    model: ModelFlag = None
    prompts_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='More prompts, one a line; - is stdin. In .jsonl files a line is {"prompt": …} '
            "with a text or a list of token ids.",
        ),
    ] = None
    prompts_format: Annotated[
        str | None,
        typer.Option(metavar="text|jsonl", help="What the file holds (default: as its name ends)."),
    ] = None
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask each prompt as a user through the chat template.")
    ] = False
    json: JsonFlag = False
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 64
    logprobs: Annotated[
        int | None,
        typer.Option(help="With --json: log probabilities of this many likeliest tokens."),
    ] = None
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="The same for the prompt's tokens.")
    ] = None
    n: Annotated[int, typer.Option("--n", help="Answers to each prompt, with seeds apart.")] = 1
    truncate_prompt_tokens: Annotated[
        int | None, typer.Option(help="Keep this many tokens of a prompt's end.")
    ] = None

    def changes(self) -> dict[str, Any]:
        """Those that are fields of `SamplingParams`, as its keywords."""
        return {
            "max_tokens": self.max_tokens,
            "n": self.n,
            "logprobs": self.logprobs,
            "prompt_logprobs": self.prompt_logprobs,
            "truncate_prompt_tokens": self.truncate_prompt_tokens,
        }

    @property
    def format(self) -> PromptsFormat | None:
        match self.prompts_format:
            case None | "text" | "jsonl" as known:
                return known
            case other:
                raise ConfigError(f"--prompts-format {other!r} is not one of text, jsonl")


def generate(
    words: Words = None, *, flags: GenerateFlags, sampling: SamplingFlags, config: EngineConfig
) -> int:
    """Continue prompts, all of them in one batch.

    Without a prompt, what is piped into stdin is one. On a terminal the answers stream side by side
    and a table of times follows; elsewhere each answer is printed when it is done, and nothing
    else. Ctrl-C keeps what was written until then.
    """
    model, prompts = _read(words or [], flags)
    from cadenza.cli.batch_run import BatchRun, opened_model

    is_shown = sys.stdout.isatty() and not flags.json
    with ExitStack() as stack:
        with loading(is_shown):
            loaded = stack.enter_context(opened_model(model, config))
        questions = [_question(loaded, prompt, flags, sampling) for prompt in prompts]
        run = BatchRun(loaded.core, loaded.text, questions, time.perf_counter)
        interrupts = stack.enter_context(Interrupts())
        if is_shown:
            run_on_terminal(run, interrupts)
        elif flags.json:
            run_as_json(run, interrupts, _facts(model, loaded))
        else:
            run_as_text(run, interrupts)
        return report_failures(run)


@contextmanager
def loading(is_shown: bool) -> Generator[None, None, None]:
    """A sign of life while a model is loaded and its programs are compiled."""
    if not is_shown:
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status("loading the model"):
        yield


def _read(words: list[str], flags: GenerateFlags) -> tuple[str | None, list[Prompt]]:
    """The model and the prompts. Raises ConfigError, InvalidRequestError."""
    asked = read_words(words, flags.model)
    prompts: list[Prompt] = [*asked.prompts]
    if flags.prompts_file is not None:
        prompts += read_prompts_file(flags.prompts_file, flags.format)
    elif flags.prompts_format is not None:
        raise ConfigError("--prompts-format says what --prompts-file holds; give both or neither")
    if not prompts and sys.stdin is not None and not sys.stdin.isatty():
        piped = read_piped_prompt(sys.stdin)
        prompts += [] if piped is None else [piped]
    if not prompts:
        raise ConfigError("there is no prompt; give at least one, pipe one in, or --prompts-file")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(flags, name) is not None and not flags.json:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} needs --json, which prints them; add it")
    if flags.chat and any(not isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("--chat needs texts; a prompt of token ids cannot be asked as a message")
    return asked.model, prompts


def _question(
    loaded: "LoadedModel", prompt: Prompt, flags: GenerateFlags, sampling: SamplingFlags
) -> "Question":
    from cadenza.cli.batch_run import Question

    given = {**sampling.changes(), **flags.changes()}
    if flags.chat:
        messages = [{"role": "user", "content": prompt}]
        prepared = loaded.text.prepare_chat(messages, given)
    else:
        prepared = loaded.text.prepare(prompt, given)
    shown = prompt if isinstance(prompt, str) else _shown_ids(prompt)
    return Question(shown=shown, sent_text=prepared.text, request=prepared.request)


def _shown_ids(ids: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, ids[:SHOWN_IDS]))
    return f"[{listed}, …]" if len(ids) > SHOWN_IDS else f"[{listed}]"


def _facts(model: str | None, loaded: "LoadedModel") -> dict[str, str]:
    traits = loaded.plan.traits
    return {
        "model": model or "bundled",
        "dtype": loaded.plan.dtype,
        "backend": traits.name,
        "exactness": traits.exactness,
    }


def _steps(run: "BatchRun", interrupts: Interrupts) -> Iterator[list["Stream"]]:
    """Runs to the end; Ctrl-C ends it between two steps."""
    while not run.is_done:
        if interrupts.is_set:
            run.close()
            raise KeyboardInterrupt
        yield run.step()


def run_as_text(run: "BatchRun", interrupts: Interrupts) -> None:
    from cadenza.cli.reports import block

    def show(stream: "Stream") -> None:
        print(block(stream, len(run.streams)), end="", flush=True)

    printed: set[int] = set()
    try:
        for news in _steps(run, interrupts):
            for stream in news:
                if stream.is_finished:
                    show(stream)
                    printed.add(stream.index)
    except KeyboardInterrupt:
        for stream in run.streams:
            if stream.text and stream.index not in printed:
                show(stream)
        raise


def run_as_json(run: "BatchRun", interrupts: Interrupts, facts: dict[str, str]) -> None:
    from cadenza.cli.reports import json_lines

    try:
        for _ in _steps(run, interrupts):
            pass
    finally:
        for line in json_lines(run, facts):
            print(line)


def run_on_terminal(run: "BatchRun", interrupts: Interrupts) -> None:
    from rich.console import Console

    from cadenza.cli.live_view import live_view, print_result

    console = Console(highlight=False)
    try:
        with live_view(run, console, time.perf_counter) as frames:
            frames.draw()
            for _ in _steps(run, interrupts):
                frames.draw()
    finally:
        print_result(run, console)


def report_failures(run: "BatchRun") -> int:
    """1 when a stream failed, each said on stderr; 0 otherwise."""
    from cadenza.cli.reports import failure

    found = [said for stream in run.streams if (said := failure(stream)) is not None]
    for said in found:
        print(f"cadenza generate: error: {said}", file=sys.stderr)
    return FAILED if found else 0
