"""`TextFrontend`: prompts in and text out, for one checkpoint.

Knows no running engine. Invariant: a checkpoint without tokenizer.json serves token ids, and
refuses text with an error that says so.
"""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from functools import partial
from operator import index
from typing import Any, TypeVar, cast

import msgspec

from cadenza.bounds import as_token_ids
from cadenza.checkpoint import Checkpoint
from cadenza.config import GenerationConfig
from cadenza.errors import (
    InvalidRequestError,
    TextTooLongError,
    must_be,
    show,
)
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.answers import AnswerParsers, AnswerPlanner, AskedAnswer, ToolUse
from cadenza.frontend.chat_prompts import ChatPrompts, Message
from cadenza.frontend.image_opening import PooledPixels
from cadenza.frontend.image_prompts import (
    ImagePrompts,
    SeenPrompts,
    Spanned,
    keep_last,
)
from cadenza.frontend.model_facts import facts_of
from cadenza.frontend.prepared_request import NO_WORKERS, PreparedRequest, TextWorkers
from cadenza.frontend.prompt_forms import Prompt, read_prompt
from cadenza.frontend.sample_output import SampleOutput
from cadenza.frontend.sampling_defaults import SamplingDefaults
from cadenza.frontend.sparse_prompts import SparsePrompts, places_in
from cadenza.option import is_integer
from cadenza.request import PoolingParams, Request, SamplingParams, prompt_only
from cadenza.structured import ConstraintSpec, StructuredOutput
from cadenza.text import (
    ChatTemplate,
    DecoderPlan,
    IncrementalDetokenizer,
    StopMatcher,
    Tokenizer,
    bad_word_token_ids,
    plan_decoder,
)
from cadenza.text.answers.content_stops import ContentStops
from cadenza.text.answers.output_parser import MakeParser, PlacedParser
from cadenza.text.schemas.grammar import (
    DEFAULT_STYLE,
    GrammarCheck,
    name_forms,
    read_form,
    refused,
)
from cadenza.text.tokens.decoder_stages import bytes_of_token

logger = logging.getLogger(__name__)

DEFAULT_PARSERS = AnswerParsers()
WHOLE_PROMPTS = SparsePrompts()
ANY_ANSWER = AskedAnswer()
_SCORED_ROLES = ('"query"', '"document"')
"""As the template of a reranker names them."""
FingerprintT = TypeVar("FingerprintT", Fingerprint, Fingerprint | None)
Params = SamplingParams | Mapping[str, object] | None
"""How to sample: `SamplingParams` are complete and taken as they are; a mapping names some of its
fields, and the others, like all of None's, are as the checkpoint recommends."""


class TextFrontend:
    """Tokenizer, chat template and sampling defaults of a checkpoint.

    Args:
        generation_config: "none" ignores the checkpoint's recommended sampling, and what is
            assumed of a GGUF file without one.
        max_model_len: the context length, where it is known; bounds a recommended length.
        workers: that check forms and open images.
        parsers: of reasoning and tool calls in answers.

    `sparse` says which prompts are thinned out: none, until it is set; `tokenizer` is None without
    tokenizer.json.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        generation_config: GenerationConfig = "auto",
        max_model_len: int | None = None,
        workers: TextWorkers = NO_WORKERS,
        parsers: AnswerParsers = DEFAULT_PARSERS,
    ) -> None:
        self.sparse = WHOLE_PROMPTS
        self.checks = workers.checks
        source = checkpoint.tokenizer_source
        self._files = checkpoint.tokenizer
        self.facts = facts_of(checkpoint)
        self.score_head = checkpoint.score_head
        self.tokenizer = None if source is None else Tokenizer(source)
        template, self._planner = ChatTemplate.from_checkpoint(checkpoint), None
        if template is not None and self.tokenizer is not None:
            self._planner = AnswerPlanner(
                template.source, self.tokenizer, parsers, reads_tools=template.reads_tools
            )
        self.chats = ChatPrompts(template, self._planner, parsers)
        vision, images = checkpoint.config.vision if checkpoint.is_known else None, None
        if vision is not None and self.tokenizer is not None:
            pixels = workers.pixels or PooledPixels()
            images = ImagePrompts(vision, self.tokenizer, self.chats.source, pixels)
        self.prompts = SeenPrompts(self.facts.name, self.chats, self.tokenizer, images)
        self._style = replace(DEFAULT_STYLE, max_string=parsers.max_string)
        formats = () if self._planner is None else self._planner.format_names
        changes = ("stable prompts",) if parsers.stable_prompts else ()
        self._forms = name_forms(self._style, (*formats, *changes))
        self._max_model_len = max_model_len
        self._pooling = checkpoint.pooling
        self._can_generate = checkpoint.can_generate
        is_followed = generation_config == "auto"
        recommended = checkpoint.generation_defaults
        self.defaults = SamplingDefaults(recommended if is_followed else None)
        if is_followed and recommended.unapplied:
            logger.warning(
                "generation_config.json recommends %s, which Cadenza does not apply; "
                "--generation-config none ignores the file's sampling",
                ", ".join(recommended.unapplied),
            )
        self._texts: dict[int, str] = {}
        self._decoder_plan: DecoderPlan | None = None

    def with_forms(self, fingerprint: FingerprintT) -> FingerprintT:
        """The fingerprint of answers whose forms are made here; None stays None."""
        if fingerprint is None or self.tokenizer is None:
            return fingerprint
        return msgspec.structs.replace(fingerprint, forms=self._forms)

    def prepare(
        self, prompt: Prompt, params: Params = None, *, max_num_tokens: int | None = None
    ) -> PreparedRequest:
        """Makes a request of a prompt. Thread-safe; slow for long texts.

        Raises:
            TextTooLongError: a text has more tokens than `max_num_tokens`.
            InvalidRequestError: the prompt or its params cannot be served.
        """
        given = read_prompt(prompt)
        if given.images:
            rendered = self.prompts.given(given.text or "", given.images)
            spanned = self.prompts.spanned(rendered, max_num_tokens, add_special_tokens=True)
        else:
            spanned = Spanned(ids=self.encode(given.content, max_num_tokens=max_num_tokens))
        return self._prepare(given.text, spanned, params, given.cache_salt)

    def prepare_chat(
        self,
        messages: SequenceOf[Message],
        params: Params = None,
        *,
        tools: SequenceOf[Message] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        max_num_tokens: int | None = None,
    ) -> PreparedRequest:
        """Makes a request of a conversation, as `prepare`. An answer that is messages in channels
        is split into its parts, and a form is that of its content."""
        rendered = self.prompts.rendered(messages, tools, template_kwargs)
        spanned = self.prompts.spanned(rendered, max_num_tokens)
        prepared = self._placed(
            self._prepare(rendered.text, spanned, params),
            *(messages, spanned),
            lambda changed: self.prompts.rendered(changed, tools, template_kwargs).text,
        )
        if not self.chats.has_channels:
            return prepared
        asked = AskedAnswer(use=ToolUse.of_rendered(tools)) if tools else ANY_ANSWER
        return self._planned(rendered.text, prepared.request, asked, self.checks.start())

    def prepare_answer(
        self,
        messages: SequenceOf[Message],
        params: SamplingParams,
        *,
        asked: AskedAnswer = ANY_ANSWER,
        template_kwargs: Mapping[str, Any] | None = None,
        max_num_tokens: int | None = None,
    ) -> PreparedRequest:
        """As `prepare_chat`; the answer is split into reasoning, content and calls of tools, and
        constrained as it is asked for. Images that have not been opened stay `pending`."""
        tools = None if asked.use is None else asked.use.rendered()
        rendered = self.prompts.rendered(messages, tools, template_kwargs)
        spanned, check = self.prompts.spanned(rendered, max_num_tokens), self.checks.start()
        request = Request(prompt_token_ids=spanned.ids, params=params)
        prepared = self._planned(rendered.text, self._resolved(request, check), asked, check)
        if not spanned.images:
            return self._placed(
                *(prepared, messages, spanned),
                lambda changed: self.prompts.rendered(changed, tools, template_kwargs).text,
            )
        request = replace(prepared.request, sparse_prefill=None)
        prepared = replace(prepared, request=request, pending=spanned)
        return self.with_pixels(prepared) if spanned.has_pixels else prepared

    def _placed(
        self,
        prepared: PreparedRequest,
        messages: SequenceOf[Message],
        spanned: Spanned,
        render: Callable[[SequenceOf[Message]], str],
    ) -> PreparedRequest:
        """A request of a conversation, with the places that are kept of it if it is thinned out."""
        request = prepared.request
        if request.sparse_prefill is None:
            return prepared
        encode = partial(self.prompts.need_tokenizer().encode, add_special_tokens=False)
        places = places_in(messages, prepared.text or "", spanned.ids, render, encode)
        num_cut = len(spanned.ids) - len(request.prompt_token_ids)
        return replace(prepared, request=self.sparse.with_places(request, places, num_cut))

    def with_pixels(self, prepared: PreparedRequest) -> PreparedRequest:
        """The request with the pixels of its images, which are opened if they are not yet. Slow;
        safe on any thread. Raises InvalidRequestError."""
        if prepared.pending is None:
            return prepared
        attachments = self.prompts.attachments(prepared.pending, None)
        ids = prepared.pending.ids
        whole = replace(prepared.request, prompt_token_ids=ids, attachments=attachments)
        request = keep_last(whole, len(prepared.request.prompt_token_ids))
        return replace(prepared, request=request, pending=None)

    def _planned(
        self, text: str, request: Request, asked: AskedAnswer, check: GrammarCheck
    ) -> PreparedRequest:
        """A request of a rendered prompt, with the parser and the constraint of its answer."""
        assert self._planner is not None, "what was rendered and encoded has a planner"
        plan = self._planner.plan(text, request.constraint, asked, check)
        params = request.params
        if plan.shows_special_tokens:
            params = replace(params, skip_special_tokens=False)
        request = replace(request, params=params, constraint=plan.constraint)
        return PreparedRequest(text=text, request=request, make_parser=plan.make_parser)

    def prepare_pooled(
        self,
        prompt: Prompt,
        pooling: PoolingParams | None = None,
        params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        max_num_tokens: int | None = None,
    ) -> PreparedRequest:
        """Makes a request for the embedding of a prompt, as `prepare`. `params` may cut the prompt
        (`request.prompt_only`)."""
        given = read_prompt(prompt)
        if given.images:
            raise InvalidRequestError(
                "embeddings are of texts alone; leave multi_modal_data out", param="prompt"
            )
        ids = self.encode(
            given.content, add_special_tokens=add_special_tokens, max_num_tokens=max_num_tokens
        )
        request = Request(
            prompt_token_ids=ids,
            params=prompt_only() if params is None else params,
            pooling=PoolingParams() if pooling is None else pooling,
            cache_salt=given.cache_salt,
        )
        return PreparedRequest(text=given.text, request=self.resolve(request))

    def prepare_scored(
        self,
        query: str,
        document: str,
        params: SamplingParams,
        *,
        max_num_tokens: int | None = None,
    ) -> PreparedRequest:
        """Makes a request for the state by which the score head scores a document for a query, as
        `prepare`.

        The two are rendered by a chat template that has the roles `query` and `document`, and are
        otherwise a pair of the tokenizer's.
        """
        template = self.chats.template
        if template is not None and all(role in template.source for role in _SCORED_ROLES):
            texts = zip(("query", "document"), (query, document), strict=True)
            messages = [{"role": role, "content": text} for role, text in texts]
            rendered = self.prompts.rendered(messages, None, None)
            ids = self.prompts.spanned(rendered, max_num_tokens).ids
        else:
            encode = self.prompts.need_tokenizer().encode_pair
            ids = tuple(encode(query, document, max_num_tokens=max_num_tokens))
        pooling = PoolingParams(pooling="last", normalize=False)
        request = Request(prompt_token_ids=ids, params=params, pooling=pooling)
        return PreparedRequest(text=None, request=self.resolve(request))

    def with_prediction(
        self, prepared: PreparedRequest, prediction: str, *, max_num_tokens: int | None = None
    ) -> PreparedRequest:
        """The request with a text that its output may repeat in part. Raises InvalidRequestError if
        that has more than `max_num_tokens`.
        """
        encode = self.prompts.need_tokenizer().encode
        try:
            ids = encode(prediction, add_special_tokens=False, max_num_tokens=max_num_tokens)
        except TextTooLongError as error:
            raise InvalidRequestError(
                f"prediction has {error.length}, more than the {max_num_tokens} that an answer can "
                f"have; shorten it",
                param="prediction",
            ) from None
        return replace(prepared, request=replace(prepared.request, prediction=tuple(ids)))

    def resolve(self, request: Request) -> Request:
        """The request with its text options as tokens: the prompt is cut to
        `truncate_prompt_tokens`, `bad_words` become token ids, `structured` a constraint, pooling
        that is not named is the checkpoint's, and it is decided whether the prompt is thinned out.
        Resolving twice changes nothing.

        Raises:
            InvalidRequestError: it is no `Request`, an option needs a tokenizer.json that is not
                there, or the model has embeddings only.
        """
        return self._resolved(request, self.checks.start())

    def _resolved(self, request: Request, check: GrammarCheck) -> Request:
        """As `resolve`; `check` is that of the request's grammars."""
        if not isinstance(request, Request):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequestError(
                f"what was submitted is {show(request)}; it must be a Request", param="request"
            )
        if request.pooling is None and not self._can_generate:
            raise InvalidRequestError(
                "this model has no head and cannot generate; ask for embeddings "
                "(/v1/embeddings, LLM.embed), or serve a checkpoint that has lm_head.weight",
                param="model",
            )
        params, ids = request.params, request.prompt_token_ids
        for name in ("stop", "bad_words", "structured"):
            if self.tokenizer is None and getattr(params, name):
                raise InvalidRequestError(
                    f"{name} needs a tokenizer.json, which this model does not have; use "
                    f"stop_token_ids, logit_bias or allowed_token_ids",
                    param=name,
                )
        if params.bad_words and not request.bad_word_token_ids:
            banned = bad_word_token_ids(self.prompts.need_tokenizer(), params.bad_words)
            request = replace(request, bad_word_token_ids=banned)
        if params.structured is not None and request.constraint is None:
            request = replace(request, constraint=self._constraint_of(params.structured, check))
        count = params.truncate_prompt_tokens
        if count is not None and len(ids) > count:
            request = keep_last(request, count)
        if request.pooling is not None and request.pooling.pooling is None:
            request = replace(request, pooling=self._resolve_pooling(request.pooling))
        return self.sparse.thinned(request)

    def _constraint_of(self, structured: StructuredOutput, check: GrammarCheck) -> ConstraintSpec:
        """Raises InvalidRequestError where it cannot be followed."""
        form = read_form(structured, self._style)
        problem = check(form.text)
        if problem is not None:
            raise refused(f"the structured output's {structured.kind} is refused: {problem}")
        return ConstraintSpec(grammar=form.text)

    def unenforced_schema(self, structured: StructuredOutput | None) -> str | None:
        """The schema that answers are checked by at their end, as their grammar does not hold all
        of it; None for most."""
        if structured is None or structured.kind != "json":
            return None
        form = read_form(structured, self._style)
        return cast(str, structured.json) if form.unenforced else None

    def ignored_formats(self, structured: StructuredOutput | None) -> tuple[str, ...]:
        """The formats of a schema that are annotations."""
        if structured is None or structured.kind != "json":
            return ()
        return read_form(structured, self._style).annotations

    def _resolve_pooling(self, params: PoolingParams) -> PoolingParams:
        default = self._pooling
        if default.pooling is None:
            raise InvalidRequestError(
                f"pooling has no default here: {default.reason}; name last or mean",
                param="pooling",
            )
        return replace(params, pooling=default.pooling)

    def _prepare(
        self, text: str | None, spanned: Spanned, params: Params, cache_salt: str = ""
    ) -> PreparedRequest:
        if not isinstance(params, SamplingParams | Mapping | None):
            raise must_be("params", params, "SamplingParams, or a mapping of some of its fields")
        if not isinstance(params, SamplingParams):
            given, num_ids = params or {}, len(spanned.ids)
            num_kept = min(num_ids, _whole(given.get("truncate_prompt_tokens"), num_ids))
            room = None if self._max_model_len is None else self._max_model_len - num_kept
            params = self.defaults.complete(given, room=room)
        request = self._request(spanned, params, cache_salt)
        return PreparedRequest(text=text, request=self.resolve(request))

    def _request(self, spanned: Spanned, params: SamplingParams, cache_salt: str = "") -> Request:
        most = self._max_model_len if params.truncate_prompt_tokens is None else None
        return Request(
            prompt_token_ids=spanned.ids,
            params=params,
            attachments=self.prompts.attachments(spanned, most),
            cache_salt=cache_salt,
        )

    def encode(
        self,
        prompt: str | SequenceOf[int],
        *,
        add_special_tokens: bool = True,
        max_num_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a prompt; ids pass as they are. Raises as `prepare`."""
        if isinstance(prompt, str):
            encode = self.prompts.need_tokenizer().encode
            return tuple(
                encode(prompt, add_special_tokens=add_special_tokens, max_num_tokens=max_num_tokens)
            )
        return as_token_ids("prompt", prompt)

    def render_chat(
        self,
        messages: SequenceOf[Message],
        *,
        tools: SequenceOf[Message] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        max_num_tokens: int | None = None,
        add_special_tokens: bool = False,
    ) -> tuple[str, tuple[int, ...]]:
        """The prompt's text and ids, up to where the assistant answers. Raises as `prepare`.

        Args:
            add_special_tokens: also add the tokenizer's special tokens; most templates write
                theirs themselves.
        """
        rendered = self.prompts.rendered(messages, tools, template_kwargs)
        spanned = self.prompts.spanned(
            rendered, max_num_tokens, add_special_tokens=add_special_tokens
        )
        return rendered.text, spanned.ids

    def sample_output(
        self, params: SamplingParams, sample: int, make_parser: MakeParser | None = None
    ) -> SampleOutput:
        """Of one sample, with a fresh detokenizer, stop matcher and parser as it needs them; it has
        no text without tokenizer.json."""
        tokenizer, plan = self.tokenizer, self._decoder_plan
        if tokenizer is None:
            return SampleOutput(sample, None)
        if plan is None:
            plan = self._decoder_plan = plan_decoder(tokenizer.decoder_description())
        detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, plan)
        matcher, parser = None, None if make_parser is None else make_parser()
        if params.stop:
            make_matcher = partial(
                StopMatcher, params.stop, is_included=params.include_stop_str_in_output
            )
            if isinstance(parser, PlacedParser):
                parser = ContentStops(parser, params.stop, make_matcher)
            else:
                matcher = make_matcher()
        return SampleOutput(
            sample, detokenizer, matcher, num_unsearched=params.min_tokens, parser=parser
        )

    def decode(self, token_ids: SequenceOf[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises InvalidRequestError."""
        decode = self.prompts.need_tokenizer().decode
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    def text_of(self, token_id: int) -> str | None:
        """One token's text, for display."""
        if self.tokenizer is None:
            return None
        text = self._texts.get(token_id)
        if text is None:
            try:
                text = self.tokenizer.decode([token_id], skip_special_tokens=False)
            except InvalidRequestError:  # a decoder that fails on this token by itself
                text = self.tokenizer.token_of(token_id) or ""
            self._texts[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes | None:
        """The bytes of a token that is a part of a character; None if they are not known."""
        piece = None if self.tokenizer is None else self.tokenizer.token_of(token_id)
        return None if piece is None else bytes_of_token(piece)

    def piece_of(self, token_id: int) -> str | None:
        """A token's entry in the vocabulary, such as `Ġcapital`; None for an unused id.

        Raises InvalidRequestError without tokenizer.json.
        """
        return self.prompts.need_tokenizer().token_of(token_id)

    def describe_tokenizer(self) -> dict[str, Any]:
        """The members of tokenizer_config.json that are known: special tokens by name, each with
        its id, and the chat template."""
        tokenizer = self.prompts.need_tokenizer()
        described: dict[str, Any] = {
            # The class that transformers loads a tokenizer.json as.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": self._max_model_len,
            "chat_template": self._files.chat_templates.get("default"),
        }
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            content = self._files.special_tokens.get(name)
            described[name] = content
            described[f"{name}_id"] = None if content is None else tokenizer.id_of(content)
        return described


def _whole(value: object, otherwise: int) -> int:
    return index(cast(int, value)) if is_integer(value) else otherwise
