"""`ModelPrompts`: prompts as texts and token ids; conversations by the chat template, or in other
forms where it refuses them, tools perhaps described in a message. Invariant: without `strict_*`
options a conversation is refused only if the template takes no form of it."""

import logging
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, cast

from cadenza.checkpoint.folder import Checkpoint
from cadenza.errors import (
    ContextLengthError,
    InvalidRequestError,
    MessagesRefusedError,
    must_be,
    show,
)
from cadenza.frontend.answers import AnswerParsers, AnswerPlanner, AskedAnswer
from cadenza.frontend.image_prompts import (
    ImagePrompts,
    PlannedImage,
    Rendered,
    Spanned,
)
from cadenza.frontend.sampling_defaults import facts_of
from cadenza.media.image_input import ImageInput, images_of
from cadenza.media.opening import PooledPixels
from cadenza.request import Attachment
from cadenza.text import ChatTemplate, Tokenizer
from cadenza.text.answers.generic_tools import (
    generic_messages,
    has_calls,
    with_description,
    with_listed_calls,
)
from cadenza.text.answers.harmony import HARMONY, harmony_messages, harmony_tools
from cadenza.text.answers.listed_calls import LFM2
from cadenza.text.templates.chat import plain_objects
from cadenza.text.templates.message_forms import (
    other_forms,
    reads_responses_only,
    stable_messages,
    with_responses,
)
from cadenza.text.templates.notices import Notices
from cadenza.vision.processor import ImageProcessor

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A prompt that the chat template renders, up to where the assistant answers."""

    messages: SequenceOf[Message]
    tools: SequenceOf[Message] | None = None  # as chat templates read them
    template_kwargs: Mapping[str, Any] | None = None
    # None: the answer's text stays whole, unless it is messages in channels
    asked: AskedAnswer | None = None


class ModelPrompts:
    """Texts and ids of one checkpoint's prompts. Without a `template` it refuses conversations,
    without a `tokenizer` texts, and images where the model does not see."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        parsers: AnswerParsers,
        pixels: PooledPixels | None,
    ) -> None:
        self._name = facts_of(checkpoint).name
        self.tokenizer = tokenizer
        files = checkpoint.tokenizer
        self.template = template = ChatTemplate.of(files.chat_templates, files.special_tokens)
        self.planner = self._images = None
        if template is not None and tokenizer is not None:
            self.planner = AnswerPlanner(
                template.source, tokenizer, parsers, reads_tools=template.reads_tools
            )
        vision = checkpoint.config.vision if checkpoint.is_known else None
        if vision is not None and tokenizer is not None:
            self._images = ImagePrompts(vision, tokenizer, self.source, pixels or PooledPixels())
        self._reads_responses = template is not None and reads_responses_only(template.source)
        self._strict_messages = parsers.strict_messages
        self._stable_prompts = parsers.stable_prompts
        self._is_strict = parsers.strict_tools
        self._notices = Notices(logger)

    @property
    def source(self) -> str | None:
        return None if self.template is None else self.template.source

    @property
    def has_reasoning(self) -> bool:
        return self.planner is not None and self.planner.has_reasoning

    @property
    def takes_tools(self) -> bool:
        """The chat template has a place for tools, or they are described elsewhere."""
        template = self.template
        return template is not None and (template.reads_tools or not self._is_strict)

    @property
    def has_channels(self) -> bool:
        return self.planner is not None and self.planner.tool_format is HARMONY

    @property
    def efforts(self) -> tuple[str, ...]:
        """The efforts of reasoning that the model knows, the least first; empty: any."""
        return ("low", "medium", "high") if self.has_channels else ()

    @property
    def options(self) -> frozenset[str]:
        """The further variables that the chat template reads, such as `enable_thinking`."""
        return frozenset() if self.template is None else self.template.options

    def known(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Variables that the chat template reads; the others are logged once by name."""
        options = self.options
        for name in variables.keys() - options:
            shown = show(name)
            self._notices.tell(shown, "the chat template has no variable %s: it is ignored", shown)
        return {name: value for name, value in variables.items() if name in options}

    @property
    def takes_images(self) -> bool:
        return self._images is not None

    @property
    def image_processor(self) -> ImageProcessor | None:
        return None if self._images is None else self._images.processor

    def close(self) -> None:
        if self._images is not None:
            self._images.pixels.close()

    def rendered(self, prompt: ChatPrompt) -> Rendered:
        """Up to where the assistant answers. Raises InvalidRequestError."""
        messages = prompt.messages
        given = messages if isinstance(messages, list | tuple) else ()  # it refuses others
        images = images_of(each for each in given if isinstance(each, Mapping))
        if images:
            messages = self._need_images().with_parts(messages)
        use = None if prompt.asked is None else prompt.asked.use
        tools = prompt.tools if use is None else use.rendered()
        return Rendered(self.render(messages, tools, prompt.template_kwargs), images)

    def planned(self, images: SequenceOf[ImageInput]) -> tuple[PlannedImage, ...]:
        """What each image becomes, by its header. Raises InvalidRequestError."""
        return self._need_images().planned(images)

    def given(self, prompt: str, images: SequenceOf[ImageInput]) -> Rendered:
        """A raw prompt with a placeholder for each of its images."""
        return Rendered(self._need_images().marked(prompt), images)

    def spanned(
        self,
        rendered: Rendered,
        max_num_tokens: int | None = None,
        *,
        add_special_tokens: bool = False,
    ) -> Spanned:
        """Token ids of a text in which a template has written its special tokens; its images need
        only have headers. Raises TextTooLongError, InvalidRequestError."""
        tokenizer = self.need_tokenizer()

        def encode(text: str) -> SequenceOf[int]:
            return tokenizer.encode(
                text, add_special_tokens=add_special_tokens, max_num_tokens=max_num_tokens
            )

        if self._images is None:
            return Spanned(ids=tuple(encode(rendered.text)))
        return self._images.spanned(rendered, encode, max_num_tokens)

    def attachments(self, spanned: Spanned, max_model_len: int | None) -> tuple[Attachment, ...]:
        """Slow; raises ContextLengthError first if the prompt is longer than `max_model_len`."""
        if not spanned.images:
            return ()
        if max_model_len is not None and len(spanned.ids) > max_model_len:
            raise ContextLengthError(
                prompt_length=f"{len(spanned.ids)} tokens",
                max_tokens=None,
                max_model_len=max_model_len,
                is_prompt_alone=True,
            )
        return self._need_images().attachments(spanned)

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(
                "this model has no tokenizer.json; give token ids instead of text", param="prompt"
            )
        return self.tokenizer

    def _need_images(self) -> ImagePrompts:
        if self._images is None:
            raise InvalidRequestError(
                f"the model {self._name} takes no images: its checkpoint has no tower that is "
                f"read, its backend encodes none, or --no-images left the tower out; send text "
                f"alone, or use a model that sees",
                param="messages",
            )
        return self._images

    def render(
        self,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        """The prompt's text, up to where the assistant answers. Raises InvalidRequestError."""
        if self.template is None:
            raise InvalidRequestError(
                "this model has no chat template; give a plain prompt instead", param="messages"
            )
        given: object = {} if template_kwargs is None else template_kwargs
        names = [*cast(Mapping[object, object], given)] if isinstance(given, Mapping) else [None]
        if [name for name in names if not isinstance(name, str) or name in ("messages", "tools")]:
            wanted = "a mapping of the chat template's own options"
            raise must_be("chat_template_kwargs", given, wanted)
        if self._stable_prompts and _are_objects(messages):
            messages = stable_messages(messages)
        if _are_objects(messages):
            messages, tools = self._prepared(self.template, messages, tools)
        return self._render_in_some_form(
            self.template, messages, tools, dict(template_kwargs or {})
        )

    def _prepared(
        self,
        template: ChatTemplate,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None,
    ) -> tuple[SequenceOf[Message], SequenceOf[Message] | None]:
        format = None if self.planner is None else self.planner.tool_format
        is_listed = format is LFM2 and template.reads_tools and not template.renders_calls
        if format is HARMONY or self._reads_responses or is_listed:
            messages = plain_objects(messages, "messages") or []
            tools = plain_objects(tools, "tools")
        if format is HARMONY:
            messages, tools = harmony_messages(messages), tools and harmony_tools(tools)
        elif self._reads_responses:
            messages = with_responses(messages)
        elif is_listed:
            messages = with_listed_calls(messages, LFM2)
        if not self._is_generic(template, messages, tools):
            return messages, tools
        assert format is not None, "what is generic has a planner"
        if tools and format.example and template.renders_calls:
            return with_description(messages, tools, format), None
        return generic_messages(messages, tools, format), None

    def _render_in_some_form(
        self,
        template: ChatTemplate,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None,
        variables: dict[str, Any],
    ) -> str:
        try:
            return template.render(messages, tools, **variables)
        except MessagesRefusedError as refusal:
            if self._strict_messages:
                raise
            for form in other_forms(messages):
                try:
                    text = template.render(form.messages, tools, **variables)
                except InvalidRequestError:
                    continue
                self._notices.tell(
                    form.change,
                    "the chat template refuses some conversations as they are, which are rendered "
                    "with %s; --strict-messages refuses them",
                    form.change,
                )
                return text
            raise refusal from None

    def _is_generic(
        self,
        template: ChatTemplate,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None,
    ) -> bool:
        if self._is_strict or self.planner is None or template.reads_tools:
            return False
        if not (_are_objects(messages) and _are_objects(() if tools is None else tools)):
            return False  # the template refuses them
        return bool(tools) or (not template.reads_calls and has_calls(messages))


def _are_objects(values: object) -> bool:
    if not isinstance(values, list | tuple):
        return False
    return all(isinstance(each, Mapping) for each in cast(SequenceOf[object], values))
