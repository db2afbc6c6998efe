"""`cadenza run`: one answer to a prompt, or a conversation where there is none."""

import sys
from contextlib import ExitStack
from typing import Annotated

import typer

from cadenza.cli.chat import ChatFlags, ChatSetup, answer_once, chat, terminal_writer, write
from cadenza.cli.model_words import first_model
from cadenza.cli.options import EngineFlags, ModelFlag
from cadenza.cli.prompts import read_piped_prompt
from cadenza.cli.sampling_flags import SamplingFlags
from cadenza.errors import ConfigError


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
