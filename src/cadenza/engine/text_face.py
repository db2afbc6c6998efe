"""`TextFace`: prompts in and text out, for one checkpoint. Composes `text` with the engine's ids.

Knows no engine. Invariant: a checkpoint without tokenizer.json serves token ids all the same, and
says so when it is asked for text.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from cadenza.checkpoint import Checkpoint
from cadenza.errors import InvalidRequestError
from cadenza.request import SamplingParams
from cadenza.text import ChatTemplate, IncrementalDetokenizer, Tokenizer

Message = Mapping[str, Any]
Prompt = str | SequenceOf[int]


class TextFace:
    """Tokenizer, chat template and sampling defaults of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.tokenizer_path
        self._tokenizer = None if path is None else Tokenizer(path)
        self._template = ChatTemplate.from_checkpoint(checkpoint)
        self._defaults = checkpoint.generation_defaults

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt; ids pass as they are. Raises InvalidRequestError."""
        if isinstance(prompt, str):
            return tuple(self._need_tokenizer().encode(prompt))
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidRequestError(
                    f"a prompt is a text or a list of token ids; it holds {token_id!r}",
                    param="prompt",
                )
        return tuple(prompt)

    def render_chat(
        self,
        messages: SequenceOf[Message],
        *,
        tools: SequenceOf[Message] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, tuple[int, ...]]:
        """The prompt's text and ids, up to where the assistant answers."""
        if self._template is None:
            raise InvalidRequestError(
                "this model has no chat template; give a plain prompt instead", param="messages"
            )
        text = self._template.render(messages, tools, **dict(template_kwargs or {}))
        # The template writes its own special tokens.
        return text, tuple(self._need_tokenizer().encode(text, add_special_tokens=False))

    def detokenizer(self) -> IncrementalDetokenizer | None:
        """A fresh one for one stream; None without tokenizer.json."""
        return None if self._tokenizer is None else IncrementalDetokenizer(self._tokenizer)

    def text_of(self, token_id: int) -> str | None:
        """One token's text, for people."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def default_params(self, **changes: Any) -> SamplingParams:
        """The checkpoint's recommended sampling, with `changes` on top."""
        recommended = {
            name: value
            for name in ("temperature", "top_k", "top_p", "min_p")
            if (value := getattr(self._defaults, name)) is not None
        }
        return SamplingParams(**{**recommended, **changes})

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "this model has no tokenizer.json; give token ids instead of text", param="prompt"
            )
        return self._tokenizer
