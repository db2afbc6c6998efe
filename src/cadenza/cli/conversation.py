"""The conversation of `cadenza chat`, and its commands: lines that begin with a slash. Invariants:
the history holds only questions with their answers; a line whose first word looks like a command is
never a message, so that a typing error does not reach the model; names of files (`/etc/hosts`) and
comments (`//`) do not look like one."""

import re
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from typer.main import get_command

from cadenza.cli.interrupts import Interrupts
from cadenza.cli.options import whole_or_auto, with_flags
from cadenza.cli.report import counted, harmless
from cadenza.cli.sampling_flags import FORMS, SamplingFlags
from cadenza.errors import InvalidRequestError
from cadenza.request import PARAMETERS

if TYPE_CHECKING:
    from cadenza.cli.batch_run import BatchRun, BatchStream
    from cadenza.frontend.image_prompts import PlannedImage
    from cadenza.frontend.loaded_model import LoadedModel
    from cadenza.media.image_input import ImageInput


TURNS_OF_A_QUESTION = 2
# Tokens that an answer should find in the context where --max-tokens does not say how many.
ROOM_FOR_AN_ANSWER = 512

# In a small context an answer should find this part of it: one token in four.
SMALL_CONTEXT_SHARE = 4


class Asked(NamedTuple):
    """What a user says in a turn."""

    text: str
    images: "tuple[ImageInput, ...]" = ()

    @property
    def content(self) -> str | list[dict[str, Any]]:
        if not self.images:
            return self.text
        from cadenza.media.image_input import image_part

        texts = [{"type": "text", "text": self.text}] if self.text else []
        return [*map(image_part, self.images), *texts]


@dataclass(slots=True, eq=False, kw_only=True)
class Conversation:
    """`last_question` is kept also where its answer failed; None before the first one. `images` go
    with the next one."""

    loaded: "LoadedModel"
    params: Mapping[str, object]
    interrupts: Interrupts
    system: str | None = None
    is_verbose: bool = False
    clock: Callable[[], float] = time.perf_counter
    turns: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], init=False)
    images: "tuple[ImageInput, ...]" = field(default=(), init=False)
    last_question: Asked | None = field(default=None, init=False)
    _num_turns_before: int = field(default=0, init=False)

    @property
    def num_questions(self) -> int:
        return len(self.turns) // TURNS_OF_A_QUESTION

    @property
    def max_model_len(self) -> int:
        return self.loaded.plan.limits.max_model_len

    def set_params(self, params: Mapping[str, object]) -> None:
        """Answers are drawn with `params` from now on. Raises InvalidRequestError."""
        self.loaded.text.defaults.complete(params)
        self.params = params

    def reset(self) -> None:
        self.turns, self.last_question, self.images = [], None, ()

    def attach(self, file: Path) -> "PlannedImage":
        """Has an image go with the next question. Raises InvalidRequestError."""
        from cadenza.frontend.image_prompts import image_input

        image = image_input(file, file.name)
        *_, planned = self.loaded.text.prompts.planned([*self.images, image])
        self.images = *self.images, image
        return planned

    def question(self, text: str) -> Asked:
        return Asked(text, self.images)

    def ask(self, asked: Asked, write: Callable[[str], object]) -> "BatchStream":
        """Submits a question and streams the answer to `write`, until it ends or Ctrl-C; no image
        is attached any more. Raises InvalidRequestError where the conversation no longer fits the
        context."""
        from cadenza.cli.batch_run import BatchRun, Question
        from cadenza.frontend.prepared_request import ChatPrompt

        self.last_question, self._num_turns_before, self.images = asked, len(self.turns), ()
        turns = [*self.turns, {"role": "user", "content": asked.content}]
        given = ChatPrompt(messages=[*self._system, *turns])
        prepared = self.loaded.text.prepare(given, self.params)
        question = Question(shown=asked.text, prepared=prepared)
        run = BatchRun(self.loaded.core, self.loaded.text, [question], self.clock)
        self._follow(run, write)
        stream = run.streams[0]
        if stream.answer and stream.state != "failed":
            self.turns = [*turns, {"role": "assistant", "content": stream.answer}]
        return stream

    def take_back(self) -> Asked | None:
        """Drops the last question with its answer, and returns it to be asked again."""
        question = self.last_question
        if question is not None:
            del self.turns[self._num_turns_before :]
        return question

    def num_tokens(self) -> int:
        """Of the context, those that the system message and the history take."""
        messages = [*self._system, *self.turns]
        return self._num_prompt_tokens(messages) if messages else 0

    def num_too_many(self, asked: Asked) -> int:
        """How many of the oldest questions must go for another and an answer to fit the context; 0
        also where it would not fit without a history."""
        user = {"role": "user", "content": asked.content}
        alone = self._num_prompt_tokens([*self._system, user])
        wanted = self.params.get("max_tokens")
        if not isinstance(wanted, int):
            share = max(1, self.max_model_len // SMALL_CONTEXT_SHARE)
            wanted = min(ROOM_FOR_AN_ANSWER, share)
        room = min(wanted, self.max_model_len - alone)
        if room <= 0:
            return 0
        for count in range(self.num_questions):
            kept = self.turns[count * TURNS_OF_A_QUESTION :]
            if self._num_prompt_tokens([*self._system, *kept, user]) + room <= self.max_model_len:
                return count
        return self.num_questions

    def drop_oldest(self, count: int) -> None:
        del self.turns[: count * TURNS_OF_A_QUESTION]

    @property
    def _system(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _num_prompt_tokens(self, messages: list[dict[str, Any]]) -> int:
        from cadenza.frontend.prepared_request import ChatPrompt

        return len(self.loaded.text.render_chat(ChatPrompt(messages=messages))[1])

    def _follow(self, run: "BatchRun", write: Callable[[str], object]) -> None:
        stream, written = run.streams[0], 0
        while not run.is_done and not self.interrupts.is_set:
            if run.step():
                text = stream.text
                write(text[written:])
                written = len(text)
        run.close()
        write(stream.text[written:])


ENDS = ("/bye", "/exit", "/quit")
RETRY = "/retry"
IMAGE = "/image"
COMMANDS = ("/help", "/?", IMAGE, "/set", "/show", "/system", RETRY, "/reset", *ENDS)
HELP = """\
/help            list these commands
/image FILE      have an image go with the next message; without FILE, none
/system TEXT     set the system message; without TEXT, remove it
/set NAME VALUE  set the sampling, as /set temperature 0; without VALUE, as at the start
/show            the model, what is set, and how full the context is
/retry           answer the last message again
/reset           forget the conversation, but not the system message
/bye             end, as /exit and Ctrl-D do
\"\"\"              begin and end a message of several lines; pasted lines are one message anyway
A message whose first word looks like a command: begin it with a blank."""

_WORD = re.compile(r"/[\w?-]*(?=\s|$)")
_SETTABLE = {field.name for field in fields(SamplingFlags)} | {"max_tokens"}
# Names that other engines have for the same.
ALIASES = {
    other: name for name in PARAMETERS if name in _SETTABLE for other in PARAMETERS[name].also
}
_SWITCHES = {"on": True, "true": True, "off": False, "false": False}


def obey(talk: Conversation, line: str) -> str | None:
    """Carries out a command and returns its reply; None where `line` is a message. Raises
    InvalidRequestError where there is no such command, or it cannot be carried out."""
    found = _WORD.match(line.strip())
    if found is None:
        return None
    name, rest = found.group(), line.strip()[found.end() :].strip()
    match name:
        case "/help" | "/?":
            return HELP
        case "/reset":
            talk.reset()
            return "The conversation is forgotten."
        case "/system":
            return _set_system(talk, rest)
        case "/image":
            return _attach(talk, rest)
        case "/set":
            return _set(talk, rest)
        case "/show":
            return _show(talk)
        case _ if line[:1].isspace():
            return None
        case _:
            raise InvalidRequestError(
                f"there is no command {name}{_near(name, COMMANDS)}; /help lists them, and a "
                f"message may begin so after a blank"
            )


def _near(name: str, known: Iterable[str]) -> str:
    found = get_close_matches(name, sorted(known), n=1, cutoff=0.7)
    return f" (did you mean {found[0]}?)" if found else ""


def _set_system(talk: Conversation, text: str) -> str:
    talk.system = text or None
    return "The system message is removed." if talk.system is None else "It is set."


def _attach(talk: Conversation, rest: str) -> str:
    """One file whose name may have blanks, or several as a shell separates them."""
    if not rest:
        dropped, talk.images = counted(len(talk.images), "image"), ()
        return f"The next message has no image (dropped: {dropped})."
    return "\n".join(_attached(talk, file) for file in _files(rest))


def _files(rest: str) -> list[Path]:
    whole = Path(rest).expanduser()
    if whole.exists():
        return [whole]
    try:
        return [Path(word).expanduser() for word in shlex.split(rest)]
    except ValueError:  # a quote without an end
        return [whole]


def _attached(talk: Conversation, file: Path) -> str:
    planned = talk.attach(file)
    size = planned.image.opened
    assert size is not None, "what is planned was measured"
    return (
        f"{harmless(file.name)}: {size.width} x {size.height} pixels, "
        f"{counted(planned.plan.num_tokens, 'token')}; it goes with the next message."
    )


def _set(talk: Conversation, rest: str) -> str:
    given, _, value = rest.partition(" ")
    if given == "parameter":  # as Ollama has it
        given, _, value = value.strip().partition(" ")
    name, value = given.lstrip("-").replace("-", "_"), value.strip()
    name = ALIASES.get(name, name)
    if name == "system":
        return _set_system(talk, value)
    if name == "verbose":
        talk.is_verbose = _switch(name, value or "on")
        return f"verbose is {'on' if talk.is_verbose else 'off'}."
    if name not in _SETTABLE:
        known = {*_SETTABLE, *ALIASES, "system", "verbose"}
        raise InvalidRequestError(
            f"/set: there is no {given!r}{_near(name, known)}; there are {', '.join(sorted(known))}"
            if given
            else f"/set NAME VALUE: give a name, one of {', '.join(sorted(known))}"
        )
    rest_of = {key: each for key, each in talk.params.items() if key != _field(name)}
    if not value:
        talk.set_params(rest_of)
        return f"{name} is as it is by default."
    talk.set_params({**rest_of, **_parsed(name, value)})
    return f"{name} is set to {value}."


def _field(name: str) -> str:
    return "structured" if name in FORMS else name


def _switch(name: str, value: str) -> bool:
    if value not in _SWITCHES:
        raise InvalidRequestError(f"/set {name} {value!r}: give on or off")
    return _SWITCHES[value]


def _parsed(name: str, value: str) -> dict[str, object]:
    """The sampling parameters that a flag with this value stands for."""
    try:
        if name == "max_tokens":
            return {name: whole_or_auto(value)}
        app = typer.Typer(add_completion=False)
        app.command()(with_flags(_take))
        command: Any = get_command(app)
        for option in command.params:
            option.envvar = None  # what is typed here comes first
        given = {each.name: [value] if each.multiple else value for each in command.params}
        context = command.make_context("set", [], default_map={name: given[name]})
        changes = SamplingFlags(**{name: context.params[name]}).changes()
    except typer.BadParameter as error:
        raise InvalidRequestError(f"/set {name} {value!r}: {error.message}") from None
    return {key: each for key, each in changes.items() if key == _field(name)}


def _take(sampling: SamplingFlags) -> None:
    """A command with the flags of `SamplingFlags`, which parses and does nothing."""
    del sampling


def _show(talk: Conversation) -> str:
    text = talk.loaded.text
    is_set = {name: value for name, value in talk.params.items() if value is not None}
    given = {name: value for name, value in is_set.items() if value is not False}
    lines = {
        "model": talk.loaded.checkpoint.outline.family,
        "context": f"{talk.num_tokens():,} of {talk.max_model_len:,} tokens, "
        f"{counted(talk.num_questions, 'question')} answered",
        "system": "none" if talk.system is None else harmless(talk.system),
        **({"images": f"{len(talk.images)} for the next message"} if talk.images else {}),
        "set": ", ".join(f"{name} {value}" for name, value in given.items()) or "nothing",
        "otherwise": text.defaults.sentence,
        "verbose": "on" if talk.is_verbose else "off",
    }
    return "\n".join(f"{name:<10} {value}" for name, value in lines.items())
