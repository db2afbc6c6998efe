"""`ConstraintCompiler`: grammars become constraints over one tokenizer's tokens, on
`CompileThreads`. Invariant: a constraint shares no state with another, so that a stream depends on
its own tokens alone. Copies of a matcher would share a lexer, whose states count against the
limits; so each has a matcher, and one for drafts."""

import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from cadenza.structured import CallRule, Constraint, ConstraintSpec
from cadenza.text.constraints.call_constraint import CallConstraint, CallWatch, ThinkingConstraint
from cadenza.text.schemas.grammar import LIMITS
from cadenza.text.tokens.tokenizer import TokenizerSource

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

logger = logging.getLogger(__name__)


ONE_BYTE = re.compile(rb"\0*+[^\0]\0*+")
"""Masks in which one byte is not zero. Most others are told apart by their first bytes."""


class ForcedText(NamedTuple):
    """The tokens of a text that must follow, of which the first `num_taken` have. The library
    tokenises all of such a text for each mask (10 ms for 30 KB), so its tokens are asked for
    once."""

    token_ids: Sequence[int] = ()
    num_taken: int = 0
    num_bytes: int = 0  # of a mask

    @property
    def rest(self) -> Sequence[int]:
        return self.token_ids[self.num_taken :]

    @property
    def next_mask(self) -> bytes | None:
        if self.num_taken == len(self.token_ids):
            return None
        return (1 << self.token_ids[self.num_taken]).to_bytes(self.num_bytes, "little")

    def behind(self, token_id: int) -> "ForcedText":
        if self.num_taken < len(self.token_ids) and self.token_ids[self.num_taken] == token_id:
            return self._replace(num_taken=self.num_taken + 1)
        return NOT_FORCED


NOT_FORCED = ForcedText()


class GrammarConstraint:
    """A `structured.Constraint` over a fresh matcher; `start_another` compiles the grammar once
    more, on another thread."""

    __slots__ = (
        "_another",
        "_forced",
        "_fork",
        "_mask",
        "_matcher",
        "_num_common",
        "_start_another",
        "_token_ids",
    )

    def __init__(
        self, matcher: "LLMatcher", start_another: "Callable[[], Future[LLMatcher]]"
    ) -> None:
        self._matcher = matcher
        self._start_another = start_another
        self._another: Future[LLMatcher] | None = None
        self._token_ids: list[int] = []
        self._mask: bytes | None = None  # what may follow, once that was asked
        self._forced = NOT_FORCED
        self._num_common = 0  # of a fork: tokens that the stream has for certain
        self._fork: GrammarConstraint | None = None

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def has_failed(self) -> bool:
        return self._matcher.is_error()

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        self._token_ids.append(token_id)
        self._mask = None
        self._forced = self._forced.behind(token_id)

    def allowed(self) -> bytes:
        if self._mask is None:
            self._mask = self._forced.next_mask or self._make_mask()
        return self._mask

    def forced(self) -> Sequence[int]:
        self.allowed()
        return self._forced.rest

    def _make_mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        if ONE_BYTE.fullmatch(mask) and not self._matcher.is_error():
            forced = ForcedText(self._matcher.compute_ff_tokens(), num_bytes=len(mask))
            if forced.next_mask == mask:
                self._forced = forced
        return mask

    def fork(self) -> "GrammarConstraint | None":
        """Always the same one. It makes more masks than the stream does, so it may reach a limit
        sooner; the stream then has no drafts any more."""
        if self._another is None:
            self._another = self._start_another()
        if not self._another.done() or self._another.cancelled():
            return None
        if self._fork is None:
            self._fork = GrammarConstraint(self._another.result(), self._start_another)
        self._fork.return_to(self._token_ids, self._forced)
        return self._fork

    def return_to(self, token_ids: list[int], forced: ForcedText) -> None:
        count, own = self._num_common, self._token_ids
        newer = islice(own, count, None), islice(token_ids, count, None)
        for mine, theirs in zip(*newer, strict=False):
            if mine != theirs:
                break
            count += 1
        self._matcher.rollback(len(own) - count)
        del own[count:]
        for token_id in token_ids[count:]:
            self.accept(token_id)
        self._num_common = count
        self._mask, self._forced = None, forced

    def restart(self) -> None:
        self._matcher.reset()
        self._token_ids = []
        self._mask, self._forced = None, NOT_FORCED
        if self._fork is not None:
            self._fork.forget()

    def forget(self) -> None:
        self._num_common = 0

    def begin_with(self, token_ids: Sequence[int]) -> bool:
        if self._matcher.validate_tokens([*token_ids]) < len(token_ids):
            return False
        for token_id in token_ids:
            self.accept(token_id)
        return True


Result = TypeVar("Result")
NUM_THREADS = 2

_Job = tuple[Future[Any], Callable[[], Any]]


@dataclass(slots=True, eq=False)
class _Line:
    """The jobs with one key that have not begun, in order."""

    size: int
    place: int
    jobs: deque[_Job] = field(default_factory=deque[_Job])
    cpu_s: float = 0.0  # of its jobs that have ended
    is_running: bool = False

    @property
    def rank(self) -> tuple[float, int, int]:
        """The least time so far first, so that neither many jobs nor slow ones are in front of
        others."""
        return self.cpu_s, self.size, self.place


class CompileThreads:
    """Threads that take the smallest job first, and the jobs of one key in turn. Thread-safe; a job
    whose future is cancelled does not begin."""

    def __init__(
        self, num_threads: int = NUM_THREADS, cpu_time: Callable[[], float] = time.thread_time
    ) -> None:
        self._most_threads = num_threads
        self._cpu_time = cpu_time
        self._changed = Condition()
        self._lines: dict[Hashable, _Line] = {}
        self._num_come = self._num_threads = self._num_idle = 0
        self._is_closed = False

    def submit(
        self, size: int, work: Callable[[], Result], key: Hashable = None
    ) -> "Future[Result]":
        """Jobs with the same `key` run one after the other; None: of this job alone. Raises
        RuntimeError after `close`."""
        future: Future[Result] = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("the threads have ended")
            index = self._num_come
            self._num_come += 1
            name = (index,) if key is None else (key, None)
            line = self._lines.setdefault(name, _Line(size, index))
            line.jobs.append((future, work))
            if self._num_idle < len(self._free()) and self._num_threads < self._most_threads:
                self._num_threads += 1
                Thread(target=self._run, name="cadenza-grammar", daemon=True).start()
            self._changed.notify()
        return future

    def close(self) -> None:
        """Jobs that have not begun are cancelled."""
        with self._changed:
            self._is_closed = True
            for line in self._lines.values():
                for future, _ in line.jobs:
                    future.cancel()
            self._lines.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                while (name := self._next()) is None and not self._is_closed:
                    self._changed.wait()
                self._num_idle -= 1
                if self._is_closed or name is None:
                    return
                line = self._lines[name]
                line.is_running = True
                job = line.jobs.popleft()
            begun_s = self._cpu_time()
            _do(*job)
            del job
            with self._changed:
                line.cpu_s += self._cpu_time() - begun_s
                line.is_running = False
                if not line.jobs:
                    self._lines.pop(name, None)
                self._changed.notify()

    def _next(self) -> Hashable:
        return min(self._free(), key=lambda name: self._lines[name].rank, default=None)

    def _free(self) -> list[Hashable]:
        return [name for name, line in self._lines.items() if line.jobs and not line.is_running]


def _do(future: "Future[Any]", work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  it is raised where the result is read
        future.set_exception(error)


class ConstraintCompiler:
    """Over a tokenizer.json. `vocab_size`: of the model, which may exceed the tokenizer's;
    `eos_token_ids`: allowed where a text is complete. The matchers of one grammar, such as those of
    a request's samples, are made one after the other, so that no request has all threads."""

    def __init__(
        self,
        source: Path | TokenizerSource,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        threads: CompileThreads | None = None,
    ) -> None:
        self._source = source
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokens: LLTokenizer | None = None
        self._has_failed = False
        self._loading = Lock()
        self._threads = threads or CompileThreads()

    def start_loading(self) -> None:
        """Makes the token table on a thread; otherwise the first constraint waits for it. That
        holds the GIL: for 0.1 s with a small vocabulary, for seconds with a large one."""
        self._threads.submit(0, self._load)

    def has_loaded(self) -> bool:
        """Waits for `start_loading`; whether the tokenizer can be used."""
        return self._threads.submit(0, self._load).result() is not None

    def compile(self, spec: ConstraintSpec) -> "Future[Constraint | None]":
        """Compiles on a thread, cheap grammars first; None if it cannot be followed."""
        if spec.grammar is not None:
            return self._submit(spec.grammar, partial(self._compile, spec, spec.grammar))
        if spec.calls is not None:
            calls = partial(self._compile_calls, spec, spec.calls)
            return self._submit(spec.calls.grammar, calls)
        done: Future[Constraint | None] = Future()
        done.set_result(self._bounded(spec, None))
        return done

    def close(self) -> None:
        self._threads.close()

    def _submit(self, grammar: str, work: Callable[[], Result]) -> "Future[Result]":
        return self._threads.submit(len(grammar), work, grammar)

    def _bounded(self, spec: ConstraintSpec, inner: Constraint | None) -> Constraint | None:
        if spec.thinking is None:
            return inner
        return ThinkingConstraint(spec.thinking, self._vocab_size, inner)

    def _compile(self, spec: ConstraintSpec, grammar: str) -> Constraint | None:
        tokens = self._load()
        made = None if tokens is None else self._constraint(tokens, grammar)
        return None if made is None else self._bounded(spec, made)

    def _compile_calls(self, spec: ConstraintSpec, rule: CallRule) -> Constraint | None:
        tokens = self._load()
        call = None if tokens is None else self._constraint(tokens, rule.grammar)
        if tokens is None or call is None:  # then calls are free, unless they must be right
            if rule.is_needed:
                return None
            return self._bounded(spec, None) or CallConstraint(None, None, self._vocab_size)
        watch = CallWatch(rule, tokens, rule.prompt_end.encode())
        return self._bounded(spec, CallConstraint(watch, call, self._vocab_size))

    def _constraint(self, tokens: "LLTokenizer", grammar: str) -> GrammarConstraint | None:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS)
        make = partial(LLMatcher, tokens, grammar, log_level=0, limits=limits)
        made = GrammarConstraint(make(), partial(self._submit, grammar, make))
        made.allowed()  # the first mask is often the slowest
        return None if made.has_failed else made

    def _load(self) -> "LLTokenizer | None":
        with self._loading:
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
        content = source.read_bytes() if isinstance(source, Path) else source.content
        described: dict[str, Any] = json.loads(content)
        text = content.decode()
        if described.get("truncation") is not None or described.get("padding") is not None:
            text = json.dumps({**described, "truncation": None, "padding": None})
        size = max(self._vocab_size, _num_ids(described))
        return LLTokenizer(text, n_vocab=size, eos_token=ends)


def _num_ids(described: dict[str, Any]) -> int:
    vocab: Any = described.get("model", {}).get("vocab", {})
    ids = cast(Iterable[int], vocab.values() if isinstance(vocab, dict) else range(len(vocab)))
    added = (each["id"] for each in described.get("added_tokens") or ())
    return 1 + max((*ids, *added), default=-1)
