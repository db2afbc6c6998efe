"""What a request is made of (`AnyPrompt`, `RequestOptions`, `Terms`), as programs give it, and the
result, `PreparedRequest`. Invariant: unsupported members of a prompt that would change the answer
are refused."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cadenza.engine.request_check import CheckedRequest, RequestCheck
from cadenza.errors import InvalidRequestError, show
from cadenza.fingerprint import Receipt
from cadenza.frontend.image_prompts import Spanned, images_of_prompt, with_images
from cadenza.frontend.model_prompts import ChatPrompt, Message
from cadenza.media.image_input import ImageInput
from cadenza.media.opening import PooledPixels
from cadenza.outputs import PromptUse
from cadenza.request import PoolingParams, Request
from cadenza.tenant import ONE_TENANT, Tenant
from cadenza.text.answers.part_parser import MakeParser
from cadenza.text.schemas.grammar import IN_PROCESS, FormChecks

MEMBERS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")
LONG_TEXT = 2048  # longer texts are tokenised on another thread than the event loop's

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
    """What is asked of a request besides its prompt and its sampling."""

    pooling: PoolingParams | None = None  # the prompt becomes an embedding
    add_special_tokens: bool = True  # to a plain text
    prediction: str = ""  # a text that the output may repeat in part
    # Tokens of prompt and answer together, at which the answer ends, as it does with the context;
    # None: an answer that does not fit the context is refused.
    most_in_all: int | None = None
    has_receipt: bool = False  # finished samples have one
    counts_prompt: bool = False  # the refusal of a prompt beyond the context counts its tokens


PLAIN = RequestOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On which terms a request is admitted: who asks, and of which engine."""

    check: RequestCheck | None = None  # the engine's; None: it checks what is submitted
    tenant: Tenant = ONE_TENANT
    cache_salt: str = ""
    priority: int = 0
    opens_images: bool = True  # otherwise a request without their pixels is left `pending`
    seal: Seal = lambda receipt: receipt


OWN_TERMS = Terms()  # of a program with an engine of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request whose text options are tokens, and how its output is made."""

    text: str | None  # the prompt's, where it was given as text
    request: Request
    make_parser: MakeParser | None = None  # of its samples' parsers; None leaves the text whole
    checked: CheckedRequest | None = None  # the request, where it has passed a check
    prompt_use: PromptUse | None = None  # where less than the whole prompt was asked for
    seal: Seal | None = None  # of finished samples' receipts; None: they have none
    pending: Spanned | None = None  # the prompt whose images have no pixels yet


@dataclass(frozen=True, slots=True, kw_only=True)
class TextWorkers:
    """What is done for a text front end elsewhere."""

    checks: FormChecks = IN_PROCESS  # of the forms of requests
    pixels: PooledPixels | None = None  # None: the model's own


NO_WORKERS = TextWorkers()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPrompt:
    """A prompt, and the text that it came from, if any."""

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
    form = cast(Mapping[str, object], prompt) if isinstance(prompt, Mapping) else None
    has_images = form is not None and form.get("multi_modal_data") is not None
    return has_images or text_length(cast(object, prompt)) > LONG_TEXT
