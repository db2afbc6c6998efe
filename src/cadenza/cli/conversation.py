"""The conversation of `cadenza chat`: its turns, its sampling, and the engine that answers.
Invariant: the history holds only questions with their answers, not a turn that failed or was
stopped before its first token.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cadenza.cli.interrupts import Interrupts

if TYPE_CHECKING:
    from cadenza.cli.batch_run import BatchRun, BatchStream
    from cadenza.frontend.image_prompts import PlannedImage
    from cadenza.frontend.loaded_model import LoadedModel
    from cadenza.media.image_input import ImageInput

TURNS_OF_A_QUESTION = 2
ROOM_FOR_AN_ANSWER = 512
"""Tokens that an answer should find in the context where --max-tokens does not say how many."""

SMALL_CONTEXT_SHARE = 4
"""In a small context an answer should find this part of it: one token in four."""


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
