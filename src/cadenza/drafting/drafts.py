"""Drafts: tokens that a step computes and verifies behind a sequence's newest one.

The target samples its own token at each position, with that position's key; a draft is accepted if
and only if it is that token. So drafts decide how many tokens a step gives, never which.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

from cadenza.drafting.draft_ledger import DraftGroup, OwnCredit
from cadenza.figures import Figure
from cadenza.request import Request
from cadenza.speculative_config import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from cadenza.structured import Constraint

MAX_CANDIDATES = 16  # earlier places, the newest first, of which the longest match is chosen


class PromptLookup:
    """Proposals for one sequence from its own tokens, and before them from a `prediction`.

    At least `shortest` tokens must match; a match longer than `longest` is not preferred. The
    `placeholder` is never proposed.
    """

    def __init__(
        self,
        *,
        shortest: int,
        longest: int,
        prediction: tuple[int, ...] = (),
        placeholder: int | None = None,
    ) -> None:
        self._shortest = shortest
        self._longest = longest
        self._num_predicted = len(prediction)
        self._placeholder = placeholder
        self._tokens: list[int] = []
        # where an n-gram of the shortest length last ended
        self._newest: dict[tuple[int, ...], int] = {}
        # for each token, where the n-gram that ends there ended before; 0 if nowhere
        self._earlier: list[int] = []
        self._extend(list(prediction))

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `token_ids`, which start with those given before."""
        self._extend(token_ids[len(self._tokens) - self._num_predicted :])
        end = self._find_longest()
        if not end:
            return []
        # A copy that reaches the newest token goes on with what it has copied.
        period = len(self._tokens) - end
        found = [self._tokens[end + index % period] for index in range(most)]
        return list(takewhile(lambda token_id: token_id != self._placeholder, found))

    def _extend(self, token_ids: list[int]) -> None:
        tokens, newest, length = self._tokens, self._newest, self._shortest
        for token_id in token_ids:
            tokens.append(token_id)
            end = len(tokens)
            if end < length:
                self._earlier.append(0)
                continue
            gram = tuple(tokens[end - length :])
            self._earlier.append(newest.get(gram, 0))
            newest[gram] = end

    def _find_longest(self) -> int:
        if not self._tokens:
            return 0
        best, best_length = 0, 0
        end = self._earlier[-1]
        for _ in range(MAX_CANDIDATES):
            if not end or best_length == self._longest:
                break
            length = self._match_length(end)
            if length > best_length:
                best, best_length = end, length
            end = self._earlier[end - 1]
        return best

    def _match_length(self, end: int) -> int:
        tokens, length = self._tokens, self._shortest
        most = min(self._longest, end)
        while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


class Lookahead:
    """What a constraint allows behind drafts, of which it accepts none.

    `masks` are what may follow: at first, and after each draft that was taken.
    """

    def __init__(self, constraint: Constraint) -> None:
        self._ahead = constraint
        self._is_fork = False
        self.masks = [constraint.allowed()]
        self.is_over = constraint.has_failed  # no draft may follow

    def take(self, token_id: int) -> bool:
        """Takes the next draft; False if it is not allowed, or what may follow it is not known."""
        if self.is_over or not _is_allowed(self.masks[-1], token_id):
            return False
        if not self._is_fork:
            fork = self._ahead.fork()
            if fork is None:
                return False
            self._ahead, self._is_fork = fork, True
        self._ahead.accept(token_id)
        self.is_over = self._ahead.is_complete
        # Behind the end no token is looked at, whatever its mask.
        mask = self.masks[-1] if self.is_over else self._ahead.allowed()
        if self._ahead.has_failed:
            self.is_over = True
            return False
        self.masks.append(mask)
        return True

    def take_all(self, drafts: Iterable[int]) -> int:
        """Takes drafts up to the first that is not allowed; returns how many."""
        return sum(1 for _ in takewhile(self.take, drafts))


def _is_allowed(mask: bytes, token_id: int) -> bool:
    place, bit = divmod(token_id, 8)
    return 0 <= place < len(mask) and bool(mask[place] >> bit & 1)


# Tokens without drafts after the last ones were not worth it; doubled each time.
FIRST_PAUSE, MAX_PAUSE = 16, 256
MAX_PAUSE_OF_PLAN = 64  # where a step was too dear for them: others may soon be cheaper

WEIGHT_OF_NEWEST = 0.25
WEIGHT_OF_DRAFT = 0.1  # of one draft in the acceptance; the first ones weigh more
NUM_PRIOR = 2
MIN_FOUND = 0.5  # of the steps that asked a source: below this, a sequence counts as tried
MIN_GAIN = 0.15  # accepted tokens for each step that tries: below this, drafting pauses


class DraftSource(Protocol):
    """Proposes tokens for one sequence."""

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `token_ids`: the sequence's so far, which start with
        those of earlier calls.
        """
        ...


FIRST_ACCEPTANCE = 0.8
# Of so many sequences one starts with the first acceptance, whatever the others have met.
PROBE_EVERY = 16


@dataclass(slots=True, eq=False)
class SharedAcceptance:
    """What the sequences of one group have met, from which others start."""

    value: float = FIRST_ACCEPTANCE
    _num_started: int = 0

    def start(self) -> float:
        self._num_started += 1
        return FIRST_ACCEPTANCE if self._num_started % PROBE_EVERY == 0 else self.value

    def learn(self, *, is_accepted: bool) -> None:
        self.value += 0.01 * (is_accepted - self.value)


@dataclass(slots=True, eq=False, kw_only=True)
class Drafting:
    """How one sequence drafts."""

    source: DraftSource | None  # None: the engine's `Drafter`
    most: int  # drafts in a step
    is_asked: bool = False  # the request asks for drafts
    acceptance: float = FIRST_ACCEPTANCE  # the chance of a draft, if those before it were accepted
    gain: float = 1.0  # mean number of accepted drafts of a step that asked `source`
    found: float = 1.0  # the share of such steps in which it knew some
    resumes_at: int = 0  # the number of tokens from which it drafts again after a pause
    shared: SharedAcceptance | None = None  # what other sequences of the group meet
    num_accepted: int = 0  # of all its drafts so far
    credit: OwnCredit = field(default_factory=OwnCredit)
    _pause: int = field(default=FIRST_PAUSE, init=False)
    _num_tried: int = field(default=0, init=False)

    @property
    def group(self) -> DraftGroup:
        return DraftGroup("model" if self.source is None else "ngram", self.is_asked)

    def is_due(self, num_tokens: int) -> bool:
        return num_tokens >= self.resumes_at

    @property
    def is_untried(self) -> bool:
        """Whether nothing is known yet of how often drafts are accepted, and `source` has not been
        asked in vain again and again."""
        return not self._num_tried and self.found > MIN_FOUND

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        """Up to `most` drafts; none if it pauses or the source knows nothing."""
        assert self.source is not None
        if not self.is_due(len(token_ids)):
            return ()
        drafts = tuple(self.source.propose(token_ids, min(most, self.most)))
        self.found += WEIGHT_OF_NEWEST * (bool(drafts) - self.found)
        if not drafts:
            self.note_none(len(token_ids))
        return drafts

    def note_none(self, num_tokens: int) -> None:
        """There were no drafts for a sequence with `num_tokens` tokens, or none was allowed."""
        self._gain(num_tokens, 0)

    def pause(self, num_tokens: int) -> None:
        """Drafts are not worth their time at this acceptance. What follows may be easier to guess,
        so that it is tried again some time."""
        self._rest(num_tokens, MAX_PAUSE_OF_PLAN)
        self.acceptance += (FIRST_ACCEPTANCE - self.acceptance) / 4

    def learn(self, num_tokens: int, num_drafts: int, num_accepted: int) -> None:
        """A step verified `num_drafts`, and `num_accepted` stayed; there are now `num_tokens`."""
        self.num_accepted += num_accepted
        for is_accepted in [True] * num_accepted + [False] * (num_accepted < num_drafts):
            self._num_tried += 1
            weight = max(WEIGHT_OF_DRAFT, 1 / (self._num_tried + NUM_PRIOR))
            self.acceptance += weight * (is_accepted - self.acceptance)
            if self.shared is not None:
                self.shared.learn(is_accepted=is_accepted)
        self._gain(num_tokens, num_accepted)

    def _gain(self, num_tokens: int, num_accepted: int) -> None:
        self.gain += WEIGHT_OF_NEWEST * (num_accepted - self.gain)
        if num_accepted:
            self._pause = FIRST_PAUSE
        if self.gain < MIN_GAIN:
            self._rest(num_tokens, MAX_PAUSE)
            self.gain = 2 * MIN_GAIN  # one success after the pause is enough to go on

    def _rest(self, num_tokens: int, most: int) -> None:
        self.resumes_at = num_tokens + min(self._pause, most)
        self._pause = min(2 * self._pause, MAX_PAUSE)


# The drafts of a request that asks for some where the engine is configured for none.
ON_REQUEST = SpeculativeConfig(method="ngram")


def drafting_of(
    request: Request,
    config: SpeculativeConfig | None,
    shared: Mapping[bool, SharedAcceptance] | None = None,
    *,
    placeholder: int | None = None,
) -> Drafting | None:
    """For one sample; None if its steps verify no drafts.

    A request turns drafts on and off, and may ask for fewer in a step than the engine's `config`
    allows. A prediction asks for them, too, unless the request turns them off; they are then looked
    up, whatever the engine's method. `shared` is that of the engine's `Drafter`, of requests that
    ask for drafts and of others: who asks may know that the text is easy to guess, so that it does
    not start from what others met. `placeholder` is never generated, and so never looked up.
    """
    asked = request.params.drafts
    is_asked = asked is not None or bool(request.prediction)
    if asked is False or not (is_asked or config):
        return None
    chosen = config or ON_REQUEST
    if chosen.has_model and not request.prediction:
        if shared is None:
            return None
        return Drafting(
            source=None,
            most=_most(request, config),
            is_asked=is_asked,
            acceptance=shared[is_asked].start(),
            shared=shared[is_asked],
        )
    source = PromptLookup(
        shortest=chosen.prompt_lookup_min,
        longest=chosen.prompt_lookup_max,
        prediction=request.prediction,
        placeholder=placeholder,
    )
    return Drafting(source=source, most=_most(request, config), is_asked=is_asked)


def _most(request: Request, config: SpeculativeConfig | None) -> int:
    asked = request.params.drafts
    most = ON_REQUEST.num_speculative_tokens if config is None else config.num_speculative_tokens
    if config is None and request.prediction:  # followed for long where it is right
        most = MAX_SPECULATIVE_TOKENS
    if asked is None or asked is True:
        return most
    return asked if config is None else min(asked, most)


@dataclass(slots=True)
class DraftCounts:
    """Counters that never decrease; the last by the place behind the newest token."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_pos: list[int] = field(default_factory=lambda: [0] * MAX_SPECULATIVE_TOKENS)

    def add(self, num_tokens: int, num_accepted: int) -> None:
        self.num_drafts += 1
        self.num_draft_tokens += num_tokens
        self.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.num_accepted_per_pos[place] += 1


DRAFT_FIGURES: tuple[Figure[DraftCounts], ...] = (
    Figure(
        "spec_decode_num_drafts",
        "Drafts verified.",
        lambda counts: counts.num_drafts,
        has_vllm_name=True,
    ),
    Figure(
        "spec_decode_num_draft_tokens",
        "Tokens of drafts.",
        lambda counts: counts.num_draft_tokens,
        has_vllm_name=True,
    ),
    Figure(
        "spec_decode_num_accepted_tokens",
        "Tokens of drafts that stayed.",
        lambda counts: counts.num_accepted_tokens,
        has_vllm_name=True,
    ),
    Figure(
        "spec_decode_num_accepted_tokens_per_pos",
        "Tokens of drafts that stayed, by their place in the draft.",
        lambda counts: {str(at): count for at, count in enumerate(counts.num_accepted_per_pos)},
        ("position",),
        has_vllm_name=True,
    ),
)
