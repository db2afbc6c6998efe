"""`cadenza chat`: a conversation through the model's chat template.

Owns the history and the reading of lines; answers stream as they come. With stdin piped, each line
is answered and nothing else is printed. Invariant: the history holds only what was asked and
answered; a turn that failed or was cut before its first word leaves no trace in it.
"""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer

from cadenza.cli.generate import loading
from cadenza.cli.interrupts import Interrupts
from cadenza.cli.options import ModelFlag, whole_or_auto
from cadenza.cli.prompts import only_model
from cadenza.cli.sampling_flags import SamplingFlags
from cadenza.config import EngineConfig
from cadenza.errors import InvalidRequestError

if TYPE_CHECKING:
    from cadenza.cli.batch_run import BatchRun, Stream
    from cadenza.engine.build import LoadedModel

FAILED = 1
HELP = "/reset forgets the conversation · /exit or Ctrl-D ends · Ctrl-C stops an answer"
MARK = "> "

Folder = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", show_default=False, help="The model's folder; without, the bundled one."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFlags:
    """The flags of this command alone."""

    model: ModelFlag = None
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message before the conversation.")
    ] = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N|auto",
            parser=whole_or_auto,
            help="Most tokens of an answer (default: auto, the rest of the context).",
        ),
    ] = None
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="After each answer, its times and prefix-cache reuse on stderr."
        ),
    ] = False


def chat(
    folder: Folder = None, *, flags: ChatFlags, sampling: SamplingFlags, config: EngineConfig
) -> int:
    """Talk with a model. /reset forgets the conversation, /exit ends it.

    With stdin piped, each line is answered and nothing else is printed.
    """
    model = only_model(folder, flags.model)
    from cadenza.cli.batch_run import opened_model

    is_person = sys.stdin.isatty() and sys.stdout.isatty()
    with ExitStack() as stack:
        with loading(is_person):
            loaded = stack.enter_context(opened_model(model, config))
        if not loaded.text.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template; use `cadenza generate` with a plain prompt"
            )
        params = {**sampling.changes(), "max_tokens": flags.max_tokens}
        loaded.text.default_params(**params)  # what cannot work is said before the first question
        interrupts = stack.enter_context(Interrupts())
        talk = Conversation(loaded=loaded, params=params, flags=flags, interrupts=interrupts)
        return _talk_with_person(talk) if is_person else _answer_lines(talk)


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation:
    """The messages so far, and the engine that answers."""

    loaded: "LoadedModel"
    params: Mapping[str, object]
    flags: ChatFlags
    interrupts: Interrupts
    clock: Callable[[], float] = time.perf_counter
    messages: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets all but the system message."""
        system = self.flags.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def ask(self, text: str, write: Callable[[str], object]) -> "Stream":
        """Sends `text` and gives the answer to `write` as it comes, until it ends or Ctrl-C.

        Raises:
            InvalidRequestError: the conversation does not fit the context any more.
        """
        from cadenza.cli.batch_run import BatchRun, Question

        messages = [*self.messages, {"role": "user", "content": text}]
        prepared = self.loaded.text.prepare_chat(messages, self.params)
        question = Question(shown=text, sent_text=prepared.text, request=prepared.request)
        run = BatchRun(self.loaded.core, self.loaded.text, [question], self.clock)
        self._follow(run, write)
        stream = run.streams[0]
        if stream.text and stream.state != "failed":
            self.messages = [*messages, {"role": "assistant", "content": stream.text}]
        return stream

    def _follow(self, run: "BatchRun", write: Callable[[str], object]) -> None:
        stream, written = run.streams[0], 0
        while not run.is_done and not self.interrupts.is_set:
            if run.step():
                text = stream.text
                write(text[written:])
                written = len(text)
        run.close()
        write(stream.text[written:])


def _answer_lines(talk: Conversation) -> int:
    """Answers the lines of stdin; ends with them, or with the first that cannot be answered."""
    while line := _next_line(talk):
        text = line.strip()
        if text == "/exit":
            break
        if text == "/reset":
            talk.reset()
        elif text:
            stream = talk.ask(text, _write)
            _write("\n")
            _tell_times(talk, stream)
            if talk.interrupts.is_set:
                raise KeyboardInterrupt
            if _tell_failure(stream):
                return FAILED
    return 0


def _next_line(talk: Conversation) -> str:
    """The next line of stdin; "" at its end."""
    with talk.interrupts.raised():
        return sys.stdin.readline()


def _talk_with_person(talk: Conversation) -> int:
    """Reads lines from a terminal, with history and editing where the platform has readline."""
    _prepare_editing()
    print(HELP)
    while (line := _read_line(talk)) is not None:
        text = line.strip()
        if text == "/exit":
            break
        if text == "/reset":
            talk.reset()
            print("(forgotten)")
        elif text.startswith("/"):
            print(HELP)
        elif text:
            _answer_person(talk, text)
    return 0


def _answer_person(talk: Conversation, text: str) -> None:
    from cadenza.cli.words import harmless

    try:
        stream = talk.ask(text, lambda part: _write(harmless(part)))
    except InvalidRequestError as error:
        print(f"error: {error} (/reset starts over)", file=sys.stderr)
        return
    _write(" [stopped]\n\n" if talk.interrupts.is_set else "\n\n")
    _tell_times(talk, stream)
    _tell_failure(stream)


def _prepare_editing() -> None:
    """Importing readline is all that `input` needs for it."""
    with suppress(ImportError):
        import_module("readline")


def _read_line(talk: Conversation) -> str | None:
    """A line; "" after Ctrl-C, which drops what was typed; None at the end."""
    try:
        with talk.interrupts.raised():
            return input(MARK)
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _tell_times(talk: Conversation, stream: "Stream") -> None:
    if not talk.flags.verbose or stream.output is None:
        return
    from cadenza.cli.words import rate_text, seconds_text

    print(
        f"({len(stream.request.prompt_token_ids)} prompt tokens, "
        f"{stream.output.num_cached_tokens} of them from the prefix cache; "
        f"TTFT {seconds_text(stream.ttft_s)}; {stream.num_tokens} tokens, "
        f"{rate_text(stream.tokens_per_s)} tok/s)",
        file=sys.stderr,
    )


def _tell_failure(stream: "Stream") -> bool:
    from cadenza.cli.reports import failure

    said = failure(stream)
    if said is not None:
        print(f"cadenza chat: error: {said}", file=sys.stderr)
    return said is not None
