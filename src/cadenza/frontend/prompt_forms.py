"""The forms in which a prompt is given: `read_prompt`.

Owns the members of vLLM's prompt dictionaries. Knows no tokenizer. Invariant: a member that would
change the answer and is not supported is refused.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import cast

from cadenza.errors import InvalidRequestError, show
from cadenza.frontend.given_images import images_of_prompt
from cadenza.media.image_input import ImageInput

MEMBERS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data")

LONG_TEXT = 2048
"""Texts of more characters are tokenised on another thread than the event loop's."""

Prompt = str | SequenceOf[int] | Mapping[str, object]
"""A text, token ids, or vLLM's dictionary: a text in `prompt`, or ids in `prompt_token_ids`, which
then count and may have their text beside them; and a `cache_salt`. A text may have images in
`multi_modal_data`, as {"image": …}, for which it has placeholders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPrompt:
    """What is computed, a text or token ids; the text that it came from, if any; the salt; the
    images of a text."""

    content: str | SequenceOf[int]
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
        content=cast("str | SequenceOf[int]", text if ids is None else ids),
        text=text,
        cache_salt=cast(str, given.get("cache_salt", "")),
    )


def text_length(prompt: object) -> int:
    """Characters that have to be tokenised."""
    form = cast(Mapping[str, object], prompt) if isinstance(prompt, Mapping) else None
    if form is not None:
        prompt = form.get("prompt") if form.get("prompt_token_ids") is None else None
    return len(prompt) if isinstance(prompt, str) else 0


def takes_long(prompt: object) -> bool:
    """Whether preparing it may take longer than an event loop should wait."""
    form = cast(Mapping[str, object], prompt) if isinstance(prompt, Mapping) else None
    has_images = form is not None and form.get("multi_modal_data") is not None
    return has_images or text_length(cast(object, prompt)) > LONG_TEXT
