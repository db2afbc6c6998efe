"""`TextFrontend`: prompts in and text out, for one checkpoint. Invariant: a checkpoint without
tokenizer.json serves token ids, and refuses text with an error that says so."""

import logging
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any, TypeVar, cast

import msgspec

from cadenza.bounds import as_token_ids
from cadenza.checkpoint.folder import Checkpoint
from cadenza.config import GenerationConfig
from cadenza.errors import (
    ContextLengthError,
    InvalidRequestError,
    TextTooLongError,
    must_be,
    show,
)
from cadenza.fingerprint import Fingerprint
from cadenza.frontend.answers import AnswerParsers, AskedAnswer, ToolUse
from cadenza.frontend.image_prompts import (
    Spanned,
    keep_last,
)
from cadenza.frontend.model_prompts import ChatPrompt, Message, ModelPrompts
from cadenza.frontend.prepared_request import (
    NO_WORKERS,
    OWN_TERMS,
    PLAIN,
    AnyPrompt,
    PreparedRequest,
    RequestOptions,
    ScoredPair,
    Terms,
    TextWorkers,
    read_prompt,
)
from cadenza.frontend.receipts import with_receipt
from cadenza.frontend.sample_output import ContentStops, SampleOutput
from cadenza.frontend.sampling_defaults import SamplingDefaults, facts_of
from cadenza.frontend.sparse_prompts import SparsePrompts, places_in
from cadenza.option import is_integer
from cadenza.request import PoolingParams, Request, SamplingParams, prompt_only
from cadenza.sparse_prefill import PromptSpan
from cadenza.structured import ConstraintSpec, StructuredOutput
from cadenza.text import (
    DecoderPlan,
    IncrementalDetokenizer,
    StopMatcher,
    Tokenizer,
    bad_word_token_ids,
    plan_decoder,
)
from cadenza.text.answers.part_parser import MakeParser, PlacedParser
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
_SCORED_ROLES = ('"query"', '"document"')  # as the template of a reranker names them
FingerprintT = TypeVar("FingerprintT", Fingerprint, Fingerprint | None)
Params = SamplingParams | Mapping[str, object] | None
"""`SamplingParams` are complete; a mapping, or None, gets the checkpoint's recommendations for the
other fields."""


class TextFrontend:
    """Tokenizer, chat template and sampling defaults of a checkpoint. `generation_config` "none"
    ignores the recommended sampling; `max_model_len` bounds a recommended length, where it is
    known; `sparse` says which prompts are pruned: none, until it is set."""

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
        self.prompts = ModelPrompts(checkpoint, self.tokenizer, parsers, workers.pixels)
        self._planner = self.prompts.planner
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
        self,
        prompt: AnyPrompt,
        params: Params = None,
        options: RequestOptions = PLAIN,
        terms: Terms = OWN_TERMS,
    ) -> PreparedRequest:
        """Makes a request of a prompt, checked where the terms have a check. Thread-safe; slow for
        long texts. Raises ContextLengthError: the prompt has more tokens than the terms' engine
        takes. Raises InvalidRequestError: the prompt or its params cannot be served."""
        if not isinstance(params, SamplingParams | Mapping | None):
            raise must_be("params", params, "SamplingParams, or a mapping of some of its fields")
        most, check = None, terms.check
        if isinstance(params, SamplingParams) and check is not None:
            is_cut = params.truncate_prompt_tokens is not None
            most = None if is_cut else check.limits.max_model_len - (params.max_tokens != 0)
        written = self._written_within(most, prompt, params, options)
        spanned = written.spanned
        params = self._completed(params, options, terms, len(spanned.ids))
        is_pending = spanned.images and not (terms.opens_images or spanned.has_pixels)
        pending, attachments = (spanned if is_pending else None), ()
        if spanned.images and not is_pending:
            most_seen = self._max_model_len if params.truncate_prompt_tokens is None else None
            attachments = self.prompts.attachments(spanned, most_seen)
        request = Request(
            prompt_token_ids=spanned.ids,
            params=params,
            pooling=options.pooling,
            attachments=attachments,
            prediction=self._predicted(options.prediction, most) if options.prediction else (),
            cache_salt=terms.cache_salt or written.cache_salt,
            priority=terms.priority,
            tenant=terms.tenant,
        )
        made = self._prepared(request, written, options, terms, pending)
        return made if pending is not None else self._admitted(made, terms, written)

    def prepare_request(
        self, request: Request, options: RequestOptions = PLAIN, terms: Terms = OWN_TERMS
    ) -> PreparedRequest:
        """As `prepare`, of a program's request. Idempotent. Raises InvalidRequestError also if it
        is no `Request`."""
        if not isinstance(request, Request):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidRequestError(
                f"what was submitted is {show(request)}; it must be a Request", param="request"
            )
        written = _Written(text=None, spanned=Spanned(ids=request.prompt_token_ids))
        return self._admitted(self._prepared(request, written, options, terms), terms)

    def completed(self, prepared: PreparedRequest, terms: Terms = OWN_TERMS) -> PreparedRequest:
        """A pending request with its images' pixels. Slow. Raises InvalidRequestError."""
        if prepared.pending is None:
            return prepared
        attachments = self.prompts.attachments(prepared.pending, None)
        ids = prepared.pending.ids
        whole = replace(prepared.request, prompt_token_ids=ids, attachments=attachments)
        request = keep_last(whole, len(prepared.request.prompt_token_ids))
        return self._admitted(replace(prepared, request=request, pending=None), terms)

    def _written_within(
        self, most: int | None, prompt: AnyPrompt, params: Params, options: RequestOptions
    ) -> "_Written":
        try:
            return self._written(prompt, options, most)
        except TextTooLongError as error:
            assert most is not None, "nothing else bounds a prompt"
            assert isinstance(params, SamplingParams), "they have the bound"
            num_tokens = error.num_tokens
            if num_tokens is None and options.counts_prompt:
                num_tokens = len(self._written(prompt, options, None).spanned.ids)
            raise ContextLengthError(
                prompt_length=error.length if num_tokens is None else f"{num_tokens} tokens",
                max_tokens=params.max_tokens,
                max_model_len=most + (params.max_tokens != 0),
                is_prompt_alone=True,
            ) from None

    def _written(self, prompt: AnyPrompt, options: RequestOptions, most: int | None) -> "_Written":
        if isinstance(prompt, ChatPrompt):
            rendered = self.prompts.rendered(prompt)
            spanned = self.prompts.spanned(rendered, most)
            return _Written(text=rendered.text, spanned=spanned, conversation=prompt)
        if isinstance(prompt, ScoredPair):
            return _Written(text=None, spanned=self._written_pair(prompt, most))
        given = read_prompt(prompt)
        if given.images and options.pooling is not None:
            raise InvalidRequestError(
                "embeddings are of texts alone; leave multi_modal_data out", param="prompt"
            )
        if given.images:
            rendered = self.prompts.given(given.text or "", given.images)
            spanned = self.prompts.spanned(rendered, most, add_special_tokens=True)
        else:
            has_special = options.add_special_tokens
            ids = self.encode(given.content, add_special_tokens=has_special, max_num_tokens=most)
            spanned = Spanned(ids=ids)
        return _Written(text=given.text, spanned=spanned, cache_salt=given.cache_salt)

    def _written_pair(self, pair: ScoredPair, most: int | None) -> Spanned:
        template = self.prompts.source
        if template is None or not all(role in template for role in _SCORED_ROLES):
            encode = self.prompts.need_tokenizer().encode_pair
            return Spanned(ids=tuple(encode(pair.query, pair.document, max_num_tokens=most)))
        texts = {"query": pair.query, "document": pair.document}
        messages = [{"role": role, "content": text} for role, text in texts.items()]
        return self.prompts.spanned(self.prompts.rendered(ChatPrompt(messages=messages)), most)

    def _completed(
        self, params: Params, options: RequestOptions, terms: Terms, num_tokens: int
    ) -> SamplingParams:
        if params is None and options.pooling is not None:
            return prompt_only()
        if not isinstance(params, SamplingParams):
            given = params or {}
            num_kept = min(num_tokens, _whole(given.get("truncate_prompt_tokens"), num_tokens))
            room = None if self._max_model_len is None else self._max_model_len - num_kept
            params = self.defaults.complete(given, room=room)
        most, check = options.most_in_all, terms.check
        if most is None or check is None:
            return params
        context, longest = check.limits.max_model_len, params.max_tokens
        num_kept = min(num_tokens, params.truncate_prompt_tokens or num_tokens)
        room = min(most, context) - num_kept
        if room < 1 or (longest is not None and longest <= room):
            return params
        return replace(params, max_tokens=None if most >= context else room)

    def _predicted(self, prediction: str, most: int | None) -> tuple[int, ...]:
        encode = self.prompts.need_tokenizer().encode
        try:
            return tuple(encode(prediction, add_special_tokens=False, max_num_tokens=most))
        except TextTooLongError as error:
            raise InvalidRequestError(
                f"prediction has {error.length}, more than the {most} that an answer can have; "
                f"shorten it",
                param="prediction",
            ) from None

    def _prepared(
        self,
        request: Request,
        written: "_Written",
        options: RequestOptions,
        terms: Terms,
        pending: Spanned | None = None,
    ) -> PreparedRequest:
        check = self.checks.start()
        request, make_parser = self._resolved(request, check), None
        conversation = written.conversation
        asked = None if conversation is None else conversation.asked
        if conversation is not None and asked is None and self.prompts.has_channels:
            tools = conversation.tools
            asked = AskedAnswer(use=ToolUse.of_rendered(tools)) if tools else ANY_ANSWER
        if asked is not None:
            assert self._planner is not None, "what was rendered and encoded has a planner"
            plan = self._planner.plan(written.text or "", request.constraint, asked, check)
            params, make_parser = request.params, plan.make_parser
            if plan.shows_special_tokens:
                params = replace(params, skip_special_tokens=False)
            request = replace(request, params=params, constraint=plan.constraint)
        made = PreparedRequest(
            text=written.text, request=request, make_parser=make_parser, pending=pending
        )
        return with_receipt(made, terms) if options.has_receipt else made

    def _admitted(
        self, prepared: PreparedRequest, terms: Terms, written: "_Written | None" = None
    ) -> PreparedRequest:
        request, check, sparse = prepared.request, terms.check, self.sparse
        if check is not None:
            sparse = sparse.scored_by(check.scored_tokens)
        request = sparse.pruned(request)
        conversation = None if written is None else written.conversation
        if request.sparse_prefill is not None and written is not None and conversation is not None:
            num_cut = len(written.spanned.ids) - len(request.prompt_token_ids)
            request = sparse.with_places(request, self._places_in(conversation, written), num_cut)
        checked = None if check is None else check.checked(request)
        used = sparse.planned_use(request)
        return replace(prepared, request=request, checked=checked, prompt_use=used)

    def _places_in(self, conversation: ChatPrompt, written: "_Written") -> SequenceOf[PromptSpan]:

        def render(messages: SequenceOf[Message]) -> str:
            return self.prompts.rendered(replace(conversation, messages=messages)).text

        encode = partial(self.prompts.need_tokenizer().encode, add_special_tokens=False)
        ids, text = written.spanned.ids, written.text or ""
        return places_in(conversation.messages, text, ids, render, encode)

    def _resolved(self, request: Request, check: GrammarCheck) -> Request:
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
        return request

    def _constraint_of(self, structured: StructuredOutput, check: GrammarCheck) -> ConstraintSpec:
        form = read_form(structured, self._style)
        problem = check(form.text)
        if problem is not None:
            raise refused(f"the structured output's {structured.kind} is refused: {problem}")
        return ConstraintSpec(grammar=form.text)

    def unenforced_schema(self, structured: StructuredOutput | None) -> str | None:
        """Checked at an answer's end, where the grammar does not hold all of it; None for most."""
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

    def encode(
        self,
        prompt: str | SequenceOf[int],
        *,
        add_special_tokens: bool = True,
        max_num_tokens: int | None = None,
    ) -> tuple[int, ...]:
        """Ids pass as they are. Raises as `prepare`."""
        if isinstance(prompt, str):
            encode = self.prompts.need_tokenizer().encode
            return tuple(
                encode(prompt, add_special_tokens=add_special_tokens, max_num_tokens=max_num_tokens)
            )
        return as_token_ids("prompt", prompt)

    def render_chat(
        self, conversation: ChatPrompt, *, add_special_tokens: bool = False
    ) -> tuple[str, tuple[int, ...]]:
        """The prompt's text and ids, up to where the assistant answers. Raises as `prepare`. Most
        templates write the special tokens themselves."""
        rendered = self.prompts.rendered(conversation)
        spanned = self.prompts.spanned(rendered, add_special_tokens=add_special_tokens)
        return rendered.text, spanned.ids

    def sample_output(
        self, params: SamplingParams, sample: int, make_parser: MakeParser | None = None
    ) -> SampleOutput:
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
        """Raises InvalidRequestError."""
        decode = self.prompts.need_tokenizer().decode
        return decode(token_ids, skip_special_tokens=skip_special_tokens)

    def text_of(self, token_id: int) -> str | None:
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
        """A token's entry in the vocabulary, such as `Ġcapital`; None for an unused id."""
        return self.prompts.need_tokenizer().token_of(token_id)

    def describe_tokenizer(self) -> dict[str, Any]:
        """What is known of tokenizer_config.json: special tokens with their ids, and the chat
        template."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    text: str | None
    spanned: Spanned
    cache_salt: str = ""
    conversation: ChatPrompt | None = None


def _whole(value: object, otherwise: int) -> int:
    return index(cast(int, value)) if is_integer(value) else otherwise
