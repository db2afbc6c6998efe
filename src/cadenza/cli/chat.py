"""`cadenza chat`: a conversation through the model's chat template.

Owns the history, the reading of input and the slash commands; answers stream. With stdin piped,
each line is answered and nothing else is printed. Invariant: the history holds only questions with
their answers; a turn that failed, or was stopped before its first token, is not in it.
"""

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cadenza.cli.interrupts import Interrupts
from cadenza.cli.options import EngineFlags, ModelArgument, ModelFlag, flag, whole_or_auto
from cadenza.cli.prompts import only_model
from cadenza.cli.sampling_flags import SamplingFlags
from cadenza.errors import InvalidRequestError

if TYPE_CHECKING:
    from cadenza.cli.batch_run import BatchRun, BatchStream
    from cadenza.frontend.loaded_model import LoadedModel, PlannedModel

FAILED = 1
MARK = "> "
CONTINUATION_MARK = "… "
QUOTES = '"""'
ENDS = ("/bye", "/exit", "/quit")
HINT = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D or /bye ends."
HELP = """\
/help          list these commands
/system TEXT   set the system message; without TEXT, remove it
/retry         answer the last message again
/reset         forget the conversation, but not the system message
/bye           end, as /exit and Ctrl-D do
\"\"\"            begin and end a message of several lines; pasted lines are one message anyway"""
BUNDLED = (
    "The bundled model ({size} parameters) is for trying the engine: it knows capitals, sums and "
    "small stories.\nTry: What is the capital of Japan? | What is 12 + 30? | "
    "Tell me a story about a fox."
)
SAME_ANSWER = "(the same again: with greedy decoding or a fixed --seed an answer does not change)"
OTHER = (
    "{name}: {family}, {size} parameters in {dtype}, context of {context:,} tokens.\n"
    "Sampling where no flag sets it: {sampling}."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFlags:
    """The flags of this command alone."""

    model: ModelFlag = None
    system: str | None = flag(None, "A system message before the conversation.", metavar="TEXT")
    max_tokens: int | None = flag(
        None,
        "Most tokens of an answer (default: auto, the rest of the context).",
        parser=whole_or_auto,
    )
    verbose: bool = flag(
        False, "After each answer, print its times and prefix-cache reuse on stderr."
    )


def chat(
    folder: ModelArgument = None,
    *,
    flags: ChatFlags,
    sampling: SamplingFlags,
    config: EngineFlags,
) -> int:
    """Talk with a model. /help lists the commands, /bye ends.

    With stdin piped, each line is answered and nothing else is printed.
    """
    model = only_model(folder, flags.model)
    from cadenza.cli.report import progress_bar
    from cadenza.frontend.loaded_model import open_model
    from cadenza.loading.plan import with_pool

    is_person = sys.stdin.isatty() and sys.stdout.isatty()
    params = {**sampling.changes(), "max_tokens": flags.max_tokens}
    with ExitStack() as stack:
        with progress_bar("loading the model") if is_person else nullcontext() as on_progress:
            planned = open_model(model, config, on_progress)
            _check_can_chat(planned, params)
            # One conversation is answered at a time, and may fill the context.
            plan = with_pool(planned.plan, config, planned.plan.limits.max_pages_per_seq)
            loaded = stack.enter_context(closing(replace(planned, plan=plan).load()))
        interrupts = stack.enter_context(Interrupts())
        talk = Conversation(loaded=loaded, params=params, flags=flags, interrupts=interrupts)
        if not is_person:
            return _answer_lines(talk)
        print(f"{introduction(model, loaded)}\n{HINT}")
        return _talk_with_person(talk)


def _check_can_chat(planned: "PlannedModel", params: Mapping[str, object]) -> None:
    """Raises InvalidRequestError for what cannot work, before weights are loaded."""
    if not planned.text.has_chat_template:
        raise InvalidRequestError(
            "this model has no chat template; use `cadenza generate` with a plain prompt"
        )
    planned.text.default_params(**params)


def introduction(model: str | None, loaded: "LoadedModel") -> str:
    """A line on the model; for the bundled one also what to ask it."""
    from cadenza.checkpoint import count_parameters
    from cadenza.cli.report import magnitude_text

    checkpoint = loaded.checkpoint
    count = count_parameters(checkpoint.config) if checkpoint.is_known else None
    size = "?" if count is None else magnitude_text(count)
    if model is None:
        return BUNDLED.format(size=size)
    return OTHER.format(
        name=Path(model).resolve().name if Path(model).exists() else model,
        family=checkpoint.outline.family,
        size=size,
        dtype=loaded.plan.dtype,
        context=loaded.plan.limits.max_model_len,
        sampling=loaded.text.defaults.sentence,
    )


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation:
    """The system message, the turns so far, and the engine that answers.

    `last_question` is kept also where its answer failed; None before the first one.
    """

    loaded: "LoadedModel"
    params: Mapping[str, object]
    flags: ChatFlags
    interrupts: Interrupts
    clock: Callable[[], float] = time.perf_counter
    system: str | None = field(init=False)
    turns: list[dict[str, str]] = field(default_factory=list[dict[str, str]], init=False)
    last_question: str | None = field(default=None, init=False)
    _num_turns_before: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.system = self.flags.system

    def reset(self) -> None:
        """Drops everything but the system message."""
        self.turns, self.last_question = [], None

    def ask(self, text: str, write: Callable[[str], object]) -> "BatchStream":
        """Submits `text` and streams the answer to `write`, until it ends or Ctrl-C.

        Raises:
            InvalidRequestError: the conversation no longer fits the context.
        """
        from cadenza.cli.batch_run import BatchRun, Question

        self.last_question, self._num_turns_before = text, len(self.turns)
        turns = [*self.turns, {"role": "user", "content": text}]
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        prepared = self.loaded.text.prepare_chat([*system, *turns], self.params)
        question = Question(shown=text, prepared=prepared)
        run = BatchRun(self.loaded.core, self.loaded.text, [question], self.clock)
        self._follow(run, write)
        stream = run.streams[0]
        if stream.text and stream.state != "failed":
            self.turns = [*turns, {"role": "assistant", "content": stream.text}]
        return stream

    def take_back(self) -> str | None:
        """Drops the last question with its answer, and returns it to be asked again."""
        question = self.last_question
        if question is not None:
            del self.turns[self._num_turns_before :]
        return question

    def _follow(self, run: "BatchRun", write: Callable[[str], object]) -> None:
        stream, written = run.streams[0], 0
        while not run.is_done and not self.interrupts.is_set:
            if run.step():
                text = stream.text
                write(text[written:])
                written = len(text)
        run.close()
        write(stream.text[written:])


def _obey(talk: Conversation, line: str) -> str | None:
    """Carries out a slash command and returns its reply; None where `line` is no such command."""
    name, _, rest = line.partition(" ")
    match name:
        case "/help" | "/?":
            return HELP
        case "/reset":
            talk.reset()
            return "The conversation is forgotten."
        case "/system":
            talk.system = rest.strip() or None
            return "The system message is removed." if talk.system is None else "It is set."
        case _:
            return None


def _answer_lines(talk: Conversation) -> int:
    """Answers the lines of stdin, up to one that cannot be answered; returns the exit code."""
    while True:
        with talk.interrupts.raised():
            line = sys.stdin.readline()
        text = line.strip()
        if not line or text in ENDS:
            return 0
        if _obey(talk, text) is not None:
            continue
        question = talk.take_back() if text == "/retry" else text
        if not question:
            continue
        stream = talk.ask(question, _write)
        _write("\n")
        _print_times(talk, stream)
        if talk.interrupts.is_set:
            raise KeyboardInterrupt
        if _print_failure(stream):
            return FAILED


def _talk_with_person(talk: Conversation) -> int:
    """Reads messages from a terminal, with history and editing where the platform has readline."""
    _prepare_editing()
    while (message := _read_message(talk)) is not None:
        text = message.strip()
        if text in ENDS:
            break
        reply = _obey(talk, text)
        if text == "/retry":
            _retry(talk)
        elif reply is not None:
            print(reply)
        elif text.startswith("/") and " " not in text and "\n" not in text:
            print(f"There is no command {text}.\n{HELP}")
        elif text:
            _answer_person(talk, text)
    return 0


def _retry(talk: Conversation) -> None:
    """Answers the last question again; explains an answer that is the same as before."""
    before = talk.turns[-1:]
    question = talk.take_back()
    if question is None:
        print("Nothing was asked yet.")
        return
    _answer_person(talk, question)
    if before and talk.turns[-1:] == before:
        print(SAME_ANSWER)


def _answer_person(talk: Conversation, text: str) -> None:
    from cadenza.cli.report import harmless

    try:
        stream = talk.ask(text, lambda part: _write(harmless(part)))
    except InvalidRequestError as error:
        print(f"error: {error} (/reset starts over)", file=sys.stderr)
        return
    _write(" [stopped]\n\n" if talk.interrupts.is_set else "\n\n")
    _print_times(talk, stream)
    _print_failure(stream)


def _prepare_editing() -> None:
    """Editing and history for `input`, and pasted lines as one message, where readline has it."""
    with suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")


def _read_message(talk: Conversation) -> str | None:
    """The next message; "" after Ctrl-C, which drops what was typed; None at the end of input."""
    try:
        with talk.interrupts.raised():
            return _read_lines()
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _read_lines() -> str:
    """A line, or all lines from one that begins with three quotes to one that ends with them."""
    line = input(MARK)
    if not line.lstrip().startswith(QUOTES):
        return line
    lines = [line.lstrip().removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(input(CONTINUATION_MARK))
    return "\n".join(lines).rstrip().removesuffix(QUOTES)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_times(talk: Conversation, stream: "BatchStream") -> None:
    if not talk.flags.verbose:
        return
    from cadenza.cli.report import rate_text, seconds_text

    print(
        f"({stream.num_prompt_tokens} prompt tokens, "
        f"{stream.num_cached_tokens} of them from the prefix cache; "
        f"TTFT {seconds_text(stream.ttft_s)}; {stream.num_tokens} tokens, "
        f"{rate_text(stream.tokens_per_s)} tok/s)",
        file=sys.stderr,
    )


def _print_failure(stream: "BatchStream") -> bool:
    from cadenza.cli.generate_report import failure

    text = failure(stream)
    if text is not None:
        print(f"cadenza chat: error: {text}", file=sys.stderr)
    return text is not None
