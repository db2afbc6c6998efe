"""What a request is made of (`AnyPrompt`, `RequestOptions`, `Terms`), and what it becomes:
`PreparedRequest`. `TextWorkers`: what is done elsewhere.

Plain values, of `TextFrontend.prepare`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cadenza.engine.open_requests import RequestTimes
from cadenza.engine.request_check import RequestCheck
from cadenza.frontend.answers import AskedAnswer
from cadenza.frontend.chat_prompts import Message
from cadenza.frontend.given_images import with_images
from cadenza.frontend.image_prompts import PixelSource, Spanned
from cadenza.frontend.prompt_forms import Prompt
from cadenza.outputs import PromptUse
from cadenza.receipt import Receipt
from cadenza.request import PoolingParams, Request
from cadenza.tenant import ONE_TENANT, Tenant
from cadenza.text.answers.output_parser import MakeParser
from cadenza.text.schemas.grammar import FormChecks
from cadenza.text.schemas.grammar_check import IN_PROCESS


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A prompt that the chat template renders, up to where the assistant answers.

    Args:
        tools: as chat templates read them.
        asked: of the answer, which is split into reasoning, content and calls, and constrained as
            it is asked for; None: its text stays whole, unless it is messages in channels.
    """

    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    template_kwargs: Mapping[str, Any] | None = None
    asked: AskedAnswer | None = None


def conversation_of(
    messages: object,
    tools: Sequence[Message] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> ChatPrompt:
    """As programs give it: its images may be PIL images, files and URLs."""
    return ChatPrompt(messages=with_images(messages), tools=tools, template_kwargs=template_kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    """A prompt by whose last state the score head scores a document for a query.

    The two are rendered by a chat template that has the roles `query` and `document`, and are
    otherwise a pair of the tokenizer's.
    """

    query: str
    document: str


AnyPrompt = Prompt | ChatPrompt | ScoredPair

Seal = Callable[[Receipt], Receipt]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What is asked of a request beside its prompt and its sampling.

    Args:
        pooling: its prompt becomes an embedding; None: an answer is generated.
        add_special_tokens: to a plain text.
        prediction: a text that the output may repeat in part.
        most_in_all: tokens of prompt and answer together, at which the answer ends, as it does with
            the context; None: an answer that does not fit the context is refused.
        has_receipt: finished samples have a receipt (`receipts.with_receipt`).
        counts_prompt: the refusal of a prompt beyond the context says how many tokens it has.
    """

    pooling: PoolingParams | None = None
    add_special_tokens: bool = True
    prediction: str = ""
    most_in_all: int | None = None
    has_receipt: bool = False
    counts_prompt: bool = False


PLAIN = RequestOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which terms a request is admitted: who asks, and of which engine.

    Args:
        check: the engine's; None: the engine checks the request when it is submitted.
        opens_images: where they lack their pixels; otherwise a request is left `pending`.
        seal: a receipt that was asked for.
    """

    check: RequestCheck | None = None
    tenant: Tenant = ONE_TENANT
    cache_salt: str = ""
    priority: int = 0
    opens_images: bool = True
    seal: Seal = lambda receipt: receipt


OWN_TERMS = Terms()
"""Of a program with an engine of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request whose text options are tokens, and how its output is made.

    Args:
        text: the prompt's text, where it was given as text.
        make_parser: of its samples' parsers; None leaves the text whole.
        passed: the check that it has passed, if it has.
        prompt_use: how much of its prompt is computed, where less than all was asked for.
        seal: that of finished samples' receipts; None: they have none (`receipts.with_receipt`).
        pending: the prompt whose images have no pixels yet (`TextFrontend.completed`).
        times: is filled in by the engine, where somebody wants them.
    """

    text: str | None
    request: Request
    make_parser: MakeParser | None = None
    passed: RequestCheck | None = None
    prompt_use: PromptUse | None = None
    seal: Seal | None = None
    pending: Spanned | None = None
    times: RequestTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWorkers:
    """What is done for a text front end elsewhere.

    Args:
        checks: of the forms of requests.
        pixels: of images; None: by processes of its own.
    """

    checks: FormChecks = IN_PROCESS
    pixels: PixelSource | None = None


NO_WORKERS = TextWorkers()
