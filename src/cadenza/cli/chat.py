"""`cadenza chat`: a conversation through the model's chat template, streamed; `cadenza run`: one
answer, or a conversation where there is no prompt. With stdin piped, each line is answered and
nothing else is printed. Invariant: a full context loses turns only as --context-policy says."""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cadenza.cli.chat_terminal import InputHistory, WordWrap, completions, unechoed
from cadenza.cli.conversation import COMMANDS, ENDS, IMAGE, RETRY, Asked, Conversation, obey
from cadenza.cli.interrupts import Interrupts, terminable
from cadenza.cli.options import EngineFlags, ModelArgument, ModelFlag, whole_or_auto
from cadenza.cli.sampling_flags import SamplingFlags
from cadenza.cli.words import YES_OR_NO, first_model, read_piped_prompt, yes_or_no
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError, InvalidRequestError
from cadenza.option import flag
from cadenza.request import SamplingParams

if TYPE_CHECKING:
    from cadenza.cli.batch_run import BatchStream
    from cadenza.frontend.loaded_model import LoadedModel, PlannedModel


FAILED = 1
MARK = "> "
CONTINUATION_MARK = "… "
QUOTES = '"""'
HINT = "/help lists the commands, Ctrl-C stops an answer, Ctrl-D or /bye ends."
HISTORY = "chat_history.jsonl"
BUNDLED = (
    "The bundled model ({size} parameters) is for trying the engine: it knows capitals, sums and "
    "small stories.\nTry: What is the capital of Japan? | What is 12 + 30? | "
    "Tell me a story about a fox."
)
FULL = (
    "The context of {size:,} tokens has no room for an answer. Drop the {count} oldest of {all} "
    "questions with their answers? [Y/n] "
)
CUT = "(the answer was cut: it fills the context of {size:,} tokens)"
SAME_ANSWER = "(the same again: with greedy decoding or a fixed --seed an answer does not change)"
OTHER = (
    "{name}: {family}, {size} parameters in {dtype}, context of {context:,} tokens.\n"
    "Sampling where no flag sets it: {sampling}."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFlags:
    """The flags of this command alone."""

    system: str | None = flag(None, "A system message before the conversation.", metavar="TEXT")
    max_tokens: int | None = flag(
        None,
        "Most tokens of an answer (default: auto, the rest of the context).",
        parser=whole_or_auto,
    )
    context_policy: Literal["ask", "drop-oldest", "refuse"] = flag(
        "ask",
        "When the context has no room for an answer: ask whether to drop the oldest turns (refuse "
        "where stdin is no terminal), drop them, or refuse the message.",
    )
    history: bool = flag(
        True,
        "Keep what is typed for later conversations, in the cache folder, readable by its owner.",
    )
    verbose: bool = flag(
        False, "After each answer, print its times and prefix-cache reuse on stderr."
    )


def chat(
    model: ModelArgument = None, *, flags: ChatFlags, sampling: SamplingFlags, config: EngineFlags
) -> int:
    """Talk with a model. /help lists the commands, /bye ends.

    With stdin piped, each line is answered and nothing else is printed.
    """
    with ExitStack() as stack:
        is_person = sys.stdin.isatty() and sys.stdout.isatty()
        setup = ChatSetup(model=model, flags=flags, sampling=sampling, config=config)
        talk = setup.open(stack, is_shown=is_person)
        if not is_person:
            return _answer_lines(talk, flags)
        stack.enter_context(terminable())  # the terminal's settings are restored
        print(f"{introduction(model, talk.loaded)}\n{HINT}")
        return _talk_with_person(talk, flags)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSetup:
    """A model and all flags of a command that talks with it."""

    model: str | None
    flags: ChatFlags
    sampling: SamplingFlags
    config: EngineConfig

    def open(self, stack: ExitStack, *, is_shown: bool) -> Conversation:
        """The model is loaded until the stack is left; `is_shown`: with a progress bar. Raises
        InvalidRequestError, before weights are loaded, for what cannot work."""
        from cadenza.cli.status import progress_bar
        from cadenza.frontend.loaded_model import open_model
        from cadenza.loading.engine_plan import with_pool

        params: dict[str, Any] = {**self.sampling.changes(), "max_tokens": self.flags.max_tokens}
        SamplingParams(**params)  # refused before a model is opened
        with progress_bar("loading the model") if is_shown else nullcontext() as on_progress:
            planned = open_model(self.model, self.config, on_progress)
            _check_can_chat(planned, params)
            # One conversation is answered at a time, and may fill the context.
            plan = with_pool(planned.plan, self.config, planned.plan.limits.max_pages_per_seq)
            loaded = stack.enter_context(closing(replace(planned, plan=plan).load()))
        return Conversation(
            loaded=loaded,
            params=params,
            interrupts=stack.enter_context(Interrupts()),
            system=self.flags.system,
            is_verbose=self.flags.verbose,
        )


def _check_can_chat(planned: "PlannedModel", params: Mapping[str, object]) -> None:
    if planned.text.prompts.template is None:
        raise InvalidRequestError(
            "this model has no chat template; use `cadenza generate` with a plain prompt"
        )
    planned.text.defaults.complete(params)


def introduction(model: str | None, loaded: "LoadedModel") -> str:
    from cadenza.cli.report import magnitude_text
    from cadenza.models.declaration import count_parameters

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


def answer_once(talk: Conversation, asked: Asked, show: Callable[[str], object]) -> int:
    """Returns the exit code. Raises KeyboardInterrupt."""
    stream = talk.ask(asked, show)
    write("\n")
    _print_cut(talk, stream)
    _print_times(talk, stream)
    if talk.interrupts.is_set:
        raise KeyboardInterrupt
    return FAILED if _print_failure(stream) else 0


def _answer_lines(talk: Conversation, flags: ChatFlags) -> int:
    """Up to one that cannot be answered; returns the exit code."""
    while True:
        with talk.interrupts.raised():
            line = sys.stdin.readline()
        text = line.strip()
        if not line or text in ENDS:
            return 0
        if text != RETRY and obey(talk, line) is not None:
            continue
        question = talk.take_back() if text == RETRY else talk.question(text)
        if question is None or not question.text:
            continue
        if flags.context_policy == "drop-oldest":
            _drop_oldest(talk, talk.num_too_many(question))
        code = answer_once(talk, question, write)
        if code:
            return code


def _drop_oldest(talk: Conversation, count: int) -> None:
    from cadenza.cli.report import counted

    if count:
        talk.drop_oldest(count)
        dropped = counted(count, "oldest question")
        print(f"(the context was full: dropped the {dropped} with the answers)", file=sys.stderr)


def _talk_with_person(talk: Conversation, flags: ChatFlags) -> int:
    from cadenza.loading.planned_engine import cache_folder

    history = InputHistory(cache_folder() / HISTORY if flags.history else None)
    _prepare_editing()
    history.load()
    while (message := _read_message(talk)) is not None:
        text = message.strip()
        history.add(message)
        if text in ENDS:
            break
        if text == RETRY:
            _retry(talk, flags)
            continue
        try:
            reply = obey(talk, message)
        except InvalidRequestError as error:
            reply = f"error: {error}"
        if reply is not None:
            print(reply)
        elif text or talk.images:
            _answer_person(talk, talk.question(text), flags)
    return 0


def _retry(talk: Conversation, flags: ChatFlags) -> None:
    before = talk.turns[-1:]
    question = talk.take_back()
    if question is None:
        print("Nothing was asked yet.")
        return
    _answer_person(talk, question, flags)
    if before and talk.turns[-1:] == before:
        print(SAME_ANSWER)


def _answer_person(talk: Conversation, asked: Asked, flags: ChatFlags) -> None:
    try:
        if not _make_room(talk, asked, flags):
            return
        with unechoed():
            stream = talk.ask(asked, terminal_writer())
    except InvalidRequestError as error:
        print(f"error: {error} (/reset starts over)", file=sys.stderr)
        return
    write(" [stopped]\n\n" if talk.interrupts.is_set else "\n\n")
    _print_cut(talk, stream)
    _print_times(talk, stream)
    _print_failure(stream)


def _make_room(talk: Conversation, asked: Asked, flags: ChatFlags) -> bool:
    """False where the person would rather not ask at all (Ctrl-C)."""
    if flags.context_policy == "refuse" or not (count := talk.num_too_many(asked)):
        return True
    if flags.context_policy == "ask":
        offer = FULL.format(size=talk.max_model_len, count=count, all=talk.num_questions)
        try:
            with talk.interrupts.raised():
                while (is_agreed := yes_or_no(input(offer), default=True)) is None:
                    print(YES_OR_NO)
                if not is_agreed:
                    return True
        except (KeyboardInterrupt, EOFError):
            print()
            return False
    _drop_oldest(talk, count)
    return True


def _prepare_editing() -> None:
    with suppress(ImportError):
        import readline

        def complete(line: str, place: int) -> str | None:
            found = completions(line, COMMANDS, IMAGE)
            return found[place] if place < len(found) else None

        readline.set_completer(complete)
        readline.set_completer_delims("\n")  # a line is one word: names of files may have blanks
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.parse_and_bind("tab: complete")


def _read_message(talk: Conversation) -> str | None:
    """ "" after Ctrl-C, which drops what was typed; None at the end of input."""
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
    line = input(MARK)
    if not line.lstrip().startswith(QUOTES):
        return line
    lines = [line.lstrip().removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(input(CONTINUATION_MARK))
    return "\n".join(lines).rstrip().removesuffix(QUOTES)


def terminal_writer() -> Callable[[str], object]:
    """With whole words in each line and without control characters."""
    from cadenza.cli.report import harmless

    wrapped = WordWrap(write)
    return lambda part: wrapped(harmless(part))


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_cut(talk: Conversation, stream: "BatchStream") -> None:
    num_tokens = stream.num_prompt_tokens + stream.num_tokens
    if stream.finish_reasons == "length" and num_tokens >= talk.max_model_len:
        print(CUT.format(size=talk.max_model_len), file=sys.stderr)


def _print_times(talk: Conversation, stream: "BatchStream") -> None:
    if not talk.is_verbose:
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
    from cadenza.cli.generate_view import failure

    text = failure(stream)
    if text is not None:
        print(f"cadenza chat: error: {text}", file=sys.stderr)
    return text is not None


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL [PROMPT]",
            help="The model, unless --model names it; all other words are the prompt.",
        ),
    ] = None,
    *,
    model: ModelFlag = None,
    flags: ChatFlags,
    sampling: SamplingFlags,
    config: EngineFlags,
) -> int:
    """Answer a prompt through the model's chat template; without a prompt, as `cadenza chat`.

    What is piped into stdin is behind the prompt's words, or is the prompt.
    """
    name, prompt = first_model(words or (), model)
    text = " ".join(prompt)
    if not sys.stdin.isatty():
        text = "\n\n".join(filter(None, (text, read_piped_prompt(sys.stdin))))
        if not text:
            raise ConfigError("there is no prompt: none is given, and stdin is empty")
    if not text:
        return chat(name, flags=flags, sampling=sampling, config=config)
    is_shown = sys.stdout.isatty()
    setup = ChatSetup(model=name, flags=flags, sampling=sampling, config=config)
    with ExitStack() as stack:
        talk = setup.open(stack, is_shown=is_shown)
        return answer_once(talk, talk.question(text), terminal_writer() if is_shown else write)
