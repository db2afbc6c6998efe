"""`ConstraintCompiler`: grammars become constraints over the tokens of one tokenizer.

Owns the token table, the compiled grammars (cached by their text) and the thread that compiles
them. Knows no requests. Invariant: a constraint shares no state with another one, so that what a
stream may continue with depends on its own tokens alone.
"""

import json
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

from cadenza.structured import ConstraintSpec
from cadenza.text.grammar import LIMITS
from cadenza.text.thinking_constraint import ThinkingConstraint
from cadenza.text.tokenizer import TokenizerSource

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)

MAX_CACHED = 64
"""Compiled grammars that are kept."""


class GrammarConstraint:
    """The constraint of one stream (`core.constraint.Constraint`)."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def has_failed(self) -> bool:
        return self._matcher.is_error()

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)

    def allowed(self) -> bytes:
        return self._matcher.compute_bitmask()

    def fork(self) -> "GrammarConstraint":
        return GrammarConstraint(self._matcher.deep_copy())


StreamConstraint = GrammarConstraint | ThinkingConstraint


class ConstraintCompiler:
    """Compiles constraints over a tokenizer.json.

    Args:
        vocab_size: of the model, which may exceed the tokenizer's.
        eos_token_ids: allowed where a text is complete.
    """

    def __init__(
        self, source: Path | TokenizerSource, *, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokens: LLTokenizer | None = None
        self._has_failed = False
        self._lock = Lock()
        self._cache: OrderedDict[str, LLMatcher] = OrderedDict()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cadenza-grammar")

    def start_loading(self) -> None:
        """Makes the token table on the thread; otherwise the first constraint waits for it.

        That holds the GIL: for 0.1 s with a small vocabulary, for seconds with a large one.
        """
        self._thread.submit(self._load)

    def has_loaded(self) -> bool:
        """Waits for `start_loading`; whether the tokenizer can be used."""
        return self._thread.submit(self._load).result() is not None

    def compile(self, spec: ConstraintSpec) -> "Future[StreamConstraint | None]":
        """Compiles on the thread; None if the grammar cannot be followed."""
        cached = None if spec.grammar is None else self._find(spec.grammar)
        if cached is None and spec.grammar is not None:
            return self._thread.submit(self._compile_bound, spec)
        done: Future[StreamConstraint | None] = Future()
        done.set_result(self._bounded(spec, cached))
        return done

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile_bound(self, spec: ConstraintSpec) -> StreamConstraint | None:
        assert spec.grammar is not None
        compiled = self._compile(spec.grammar)
        return None if compiled is None else self._bounded(spec, compiled)

    def _bounded(
        self, spec: ConstraintSpec, inner: GrammarConstraint | None
    ) -> StreamConstraint | None:
        """Within the bound of thinking, if there is one."""
        if spec.thinking is None:
            return inner
        return ThinkingConstraint(spec.thinking, self._vocab_size, inner)

    def _find(self, grammar: str) -> GrammarConstraint | None:
        with self._lock:
            found = self._cache.get(grammar)
            if found is None:
                return None
            self._cache.move_to_end(grammar)
            return GrammarConstraint(found.deep_copy())

    def _compile(self, grammar: str) -> GrammarConstraint | None:
        from llguidance import LLMatcher, LLParserLimits

        cached = self._find(grammar)
        if cached is not None:
            return cached
        tokens = self._load()
        if tokens is None:
            return None
        matcher = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        if matcher.is_error():
            return None
        with self._lock:
            self._cache[grammar] = matcher
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return GrammarConstraint(matcher.deep_copy())

    def _load(self) -> "LLTokenizer | None":
        """The token table; None if the library cannot use the tokenizer. On the thread only."""
        if self._tokens is None and not self._has_failed:
            try:
                self._tokens = self._make_tokens()
            except Exception:
                logger.warning("no structured outputs: the tokenizer is of an unknown kind")
                logger.debug("the tokenizer cannot be used", exc_info=True)
                self._has_failed = True
        return self._tokens

    def _make_tokens(self) -> "LLTokenizer":
        from llguidance import LLTokenizer

        source, ends = self._source, self._eos_token_ids or None
        content = source.read_bytes() if isinstance(source, Path) else source.read()
        described = json.loads(content)
        text = json.dumps({**described, "truncation": None, "padding": None})
        size = max(self._vocab_size, _num_ids(described))
        return LLTokenizer(text, n_vocab=size, eos_token=ends)


def _num_ids(described: dict[str, Any]) -> int:
    """One more than the largest id of a tokenizer.json."""
    vocab: Any = described.get("model", {}).get("vocab", {})
    ids = cast(Iterable[int], vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
    added = (each["id"] for each in described.get("added_tokens") or ())
    return 1 + max((*ids, *added), default=-1)
