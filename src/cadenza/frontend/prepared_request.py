"""What a request is made of (`AnyPrompt`, `RequestOptions`, `Terms`), as programs give it, and the
result, `PreparedRequest`. Invariant: unsupported members of a prompt that would change the answer
are refused."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cadenza.engine.request_check import CheckedRequest, RequestCheck
from cadenza.errors import InvalidRequestError, show
from cadenza.fingerprint import Receipt
from cadenza.frontend.given_images import images_of_prompt, with_images
from cadenza.frontend.image_prompts import PixelSource, Spanned
from cadenza.frontend.model_prompts import ChatPrompt, Message
from cadenza.media.image_input import ImageInput
from cadenza.outputs import PromptUse
from cadenza.request import PoolingParams, Request
from cadenza.tenant import ONE_TENANT, Tenant
from cadenza.text.answers.output_parser import MakeParser
from cadenza.text.schemas.grammar import FormChecks
from cadenza.text.schemas.grammar_check import IN_PROCESS

MEMBERS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")

LONG_TEXT = 2048
"""Texts of more characters are tokenised on another thread than the event loop's."""

Prompt = str | Sequence[int] | Mapping[str, object]
"""A text, token ids, or vLLM's dictionary: a text in `prompt`, or ids in `prompt_token_ids`, which
then count and may come with their text; and a `cache_salt`. A text may have images in
`multi_modal_data`, as {"image": …}, for which it has placeholders."""


def conversation_of(
    messages: object,
    tools: Sequence[Message] | None,
    template_kwargs: Mapping[str, Any] | None,
) -> ChatPrompt:
    """As programs give it: its images may be PIL images, files and URLs."""
    return ChatPrompt(messages=with_images(messages), tools=tools, template_kwargs=template_kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPair:
    """A query and a document, scored by the score head from the prompt's last state; rendered by a
    chat template with the roles `query` and `document`, or as the tokenizer's pair."""

    query: str
    document: str


AnyPrompt = Prompt | ChatPrompt | ScoredPair

Seal = Callable[[Receipt], Receipt]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What is asked of a request besides its prompt and its sampling. `pooling`: its prompt becomes
    an embedding; None: an answer is generated. `add_special_tokens`: to a plain text. `prediction`:
    a text that the output may repeat in part. `most_in_all`: tokens of prompt and answer together,
    at which the answer ends, as it does with the context; None: an answer that does not fit the
    context is refused. `has_receipt`: finished samples have a receipt (`receipts.with_receipt`).
    `counts_prompt`: the refusal of a prompt beyond the context says how many tokens it has."""

    pooling: PoolingParams | None = None
    add_special_tokens: bool = True
    prediction: str = ""
    most_in_all: int | None = None
    has_receipt: bool = False
    counts_prompt: bool = False


PLAIN = RequestOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which terms a request is admitted: who asks, and of which engine. `check`: the engine's;
    None: the engine checks the request when it is submitted. `opens_images`: where they lack their
    pixels; otherwise a request is left `pending`. `seal`: a receipt that was asked for."""

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
    """A request whose text options are tokens, and how its output is made. `text`: the prompt's
    text, where it was given as text. `make_parser`: of its samples' parsers; None leaves the text
    whole. `checked`: the request, where it has passed a check. `prompt_use`: how much of its prompt
    is computed, where less than all was asked for. `seal`: that of finished samples' receipts;
    None: they have none (`receipts.with_receipt`). `pending`: the prompt whose images have no
    pixels yet (`TextFrontend.completed`)."""

    text: str | None
    request: Request
    make_parser: MakeParser | None = None
    checked: CheckedRequest | None = None
    prompt_use: PromptUse | None = None
    seal: Seal | None = None
    pending: Spanned | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWorkers:
    """What is done for a text front end elsewhere. `checks`: of the forms of requests. `pixels`: of
    images; None: by processes of its own."""

    checks: FormChecks = IN_PROCESS
    pixels: PixelSource | None = None


NO_WORKERS = TextWorkers()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPrompt:
    """What is computed, a text or token ids; the text that it came from, if any; the salt; the
    images of a text."""

    content: str | Sequence[int]
    text: str | None
    cache_salt: str = ""
    images: tuple[ImageInput, ...] = ()


def read_prompt(prompt: Prompt) -> GivenPrompt:
    """Raises InvalidRequestError for a dictionary without a prompt, or with an unknown member."""
    if not isinstance(prompt, Mapping):
        return GivenPrompt(content=prompt, text=prompt if isinstance(prompt, str) else None)
    form = cast(Mapping[object, object], prompt)
    given = {name: value for name, value in form.items() if value is not None}
    unknown = [name for name in given if name not in MEMBERS]
    if unknown:
        raise InvalidRequestError(
            f"the prompt has {', '.join(map(show, unknown))}, which is not supported; a prompt as "
            f"a dictionary has {', '.join(MEMBERS)}",
            param="prompt",
        )
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if ids is None and text is None:
        raise InvalidRequestError(
            f"the prompt is {show(prompt)}; give a text in prompt, or token ids in "
            f"prompt_token_ids",
            param="prompt",
        )
    if not isinstance(text, str | None):
        raise InvalidRequestError(
            f"prompt is {show(text)}; in a dictionary it must be a text, and token ids are "
            f"prompt_token_ids",
            param="prompt",
        )
    images = images_of_prompt(given.get("multi_modal_data", {}))
    if images and ids is not None:
        raise InvalidRequestError(
            "multi_modal_data goes with a text in prompt, whose placeholders its images replace; "
            "give the text instead of prompt_token_ids",
            param="prompt",
        )
    return GivenPrompt(
        images=images,
        content=cast("str | Sequence[int]", text if ids is None else ids),
        text=text,
        cache_salt=cast(str, given.get("cache_salt", "")),
    )


def text_length(prompt: object) -> int:
    form = cast(Mapping[str, object], prompt) if isinstance(prompt, Mapping) else None
    if form is not None:
        prompt = form.get("prompt") if form.get("prompt_token_ids") is None else None
    return len(prompt) if isinstance(prompt, str) else 0


def takes_long(prompt: object) -> bool:
    """Whether preparing it may take longer than an event loop should wait."""
    form = cast(Mapping[str, object], prompt) if isinstance(prompt, Mapping) else None
    has_images = form is not None and form.get("multi_modal_data") is not None
    return has_images or text_length(cast(object, prompt)) > LONG_TEXT
