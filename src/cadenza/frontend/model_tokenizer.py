"""`ModelTokenizer`: tokenizer and chat template for programs, under transformers' names; the rules
are `TextFrontend`'s. Invariant: what it encodes is what `LLM` computes for the same text."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Literal, overload

from cadenza.frontend.prepared_request import Message, conversation_of
from cadenza.frontend.text_frontend import TextFrontend


class ModelTokenizer:
    """The result of `get_tokenizer`."""

    def __init__(self, text: TextFrontend) -> None:
        self._text = text

    @property
    def vocab_size(self) -> int:
        """Number of entries, including added tokens."""
        return self._described["vocab_size"]

    @property
    def special_tokens(self) -> dict[str, int]:
        """The texts of bos, eos, unk and pad, as far as there are such, with their ids."""
        described = self._described
        names = [name.removesuffix("_id") for name in described if name.endswith("_token_id")]
        return {
            described[name]: described[f"{name}_id"]
            for name in names
            if described[f"{name}_id"] is not None
        }

    @property
    def bos_token_id(self) -> int | None:
        return self._described["bos_token_id"]

    @property
    def eos_token_id(self) -> int | None:
        return self._described["eos_token_id"]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Spelled control tokens are text, unless a chat template wrote them. Raises
        InvalidRequestError."""
        return [*self._text.encode(text, add_special_tokens=add_special_tokens)]

    def decode(self, token_ids: SequenceOf[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises InvalidRequestError."""
        return self._text.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, token_ids: SequenceOf[int]) -> list[str | None]:
        """The vocabulary's entries; None for an unused id. Raises InvalidRequestError."""
        return [self._text.piece_of(token_id) for token_id in token_ids]

    @overload
    def apply_chat_template(
        self,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None = None,
        *,
        tokenize: Literal[True] = True,
        **options: Any,
    ) -> list[int]: ...

    @overload
    def apply_chat_template(
        self,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None = None,
        *,
        tokenize: Literal[False],
        **options: Any,
    ) -> str: ...

    def apply_chat_template(
        self,
        messages: SequenceOf[Message],
        tools: SequenceOf[Message] | None = None,
        *,
        tokenize: bool = True,
        **options: Any,
    ) -> list[int] | str:
        """The prompt's token ids, or its text.

        Args:
            options: `add_generation_prompt` (true by default), `continue_final_message`, and the
                template's own options.

        Raises:
            InvalidRequestError: there is no template, or it rejects the messages.
        """
        text, ids = self._text.render_chat(conversation_of(messages, tools, options))
        return [*ids] if tokenize else text

    @property
    def _described(self) -> Mapping[str, Any]:
        return self._text.describe_tokenizer()
