"""`FairShare`: whose turn it is among tenants, by virtual token counters.

The algorithm is VTC (Sheng et al., "Fairness in Serving Large Language Models", arXiv 2401.00588).
Owns each tenant's counter: the service that it has had, divided by its weight. A prompt is charged
when its sequence first starts, an output token when the step that samples it is launched.
Invariants: with one tenant no order changes; while two tenants both have waiting sequences, their
services differ by at most 2 max(w_p L, w_q M) + C, and as long as one has some, no other gets so
much more. w_p and w_q are the costs of a prompt token and an output token, L the tokens of a
prompt, M those of the pool, and C the credit of a tenant that joins.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cadenza.config import EngineLimits
from cadenza.core.batch import BatchEntry
from cadenza.core.sequence import Sequence
from cadenza.core.step_cost import StepBound, StepCost, full_decode
from cadenza.request import Tenant

CREDIT_STEPS = 4
"""A tenant may save up the cost of so many steps full of prompt tokens while it asks for less than
its share: prompts that come close after one another then need not wait for other tenants' turns."""

MAX_COUNTERS = 1024
"""Above so many counters, those that a tenant would get anyway when it comes back are dropped."""

LEAST_PROMPT_COST = 0.01
"""Of an output token's cost: prompts are not free where measured times are too noisy to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCost:
    """What computing a token of a prompt costs, and generating a token; in any one unit."""

    prompt: float = 1.0
    output: float = 2.0


def measured_service_cost(cost: StepCost, num_rows: int) -> ServiceCost:
    """In milliseconds: a prompt token beside others, and a row of a step in which all decode."""
    output_ms = cost.predict_ms(full_decode(num_rows)) / num_rows
    return ServiceCost(prompt=max(cost.token_ms, LEAST_PROMPT_COST * output_ms), output=output_ms)


def fair_share_of(bound: StepBound | None, limits: EngineLimits) -> "FairShare":
    """With the costs measured so far as weights of tokens, if there are any."""
    cost = ServiceCost()
    if bound is not None:
        cost = measured_service_cost(bound.cost, limits.max_num_seqs)
    return FairShare(cost, cost.prompt * CREDIT_STEPS * limits.max_num_batched_tokens)


class FairShare:
    """The counters of one scheduler, which says what waits, starts and is launched.

    `credit`: how far a tenant's counter may be below the others' when it joins.
    """

    def __init__(self, cost: ServiceCost | None = None, credit: float = 0.0) -> None:
        self._cost = cost or ServiceCost()
        self._credit = credit
        self._counters: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}
        self._level = 0.0
        self._last_left = ""

    @property
    def waiting_names(self) -> Iterable[str]:
        """The tenants of which sequences wait."""
        return self._num_waiting

    def join(self, tenant: Tenant) -> None:
        """One more sequence of the tenant waits. If it is the only one, the counter is lifted to
        the level, less the credit: nobody saves up more while asking for nothing.
        """
        name = tenant.name
        count = self._num_waiting.get(name, 0)
        if not count:
            self._raise_level()
            floor = self._level - self._credit
            self._counters[name] = max(self._counters.get(name, 0.0), floor)
            if len(self._counters) > MAX_COUNTERS:
                self._drop_idle()
        self._num_waiting[name] = count + 1

    def leave(self, tenant: Tenant) -> None:
        """One sequence less of the tenant waits."""
        name = tenant.name
        self._num_waiting[name] -= 1
        if not self._num_waiting[name]:
            del self._num_waiting[name]
            self._last_left = name

    def counter_of(self, sequence: Sequence) -> float:
        return self._counters.get(sequence.tenant.name, 0.0)

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence starts for the first time; `num_tokens` of its prompt are to be computed."""
        self._charge(sequence.tenant, self._cost.prompt * num_tokens)

    def charge_outputs(self, entries: Iterable[BatchEntry]) -> None:
        """A step is launched. A draft, or a token that was not sampled, costs as much as a prompt
        token."""
        if len(self._counters) < 2:
            return
        for entry in entries:
            if entry.num_choices:
                sequence = entry.sequence
                # Older ones were computed while there was no other tenant.
                most = entry.num_new_tokens - entry.num_choices
                num_unsampled = min(sequence.num_uncharged_tokens, most)
                num_beside = entry.num_choices - 1 + num_unsampled
                service = self._cost.output + self._cost.prompt * num_beside
                self._charge(sequence.tenant, service)
                sequence.num_uncharged_tokens = 0

    def charge_ms(self, sequence: Sequence, milliseconds: float) -> None:
        """Something else is computed for a sequence, where costs are milliseconds."""
        self._charge(sequence.tenant, milliseconds)

    def charge_tokens(self, sequence: Sequence, num_tokens: float) -> None:
        """The same that takes as long as so many tokens of a prompt."""
        self._charge(sequence.tenant, self._cost.prompt * num_tokens)

    def in_turns(self, ordered: list[Sequence]) -> Iterable[Sequence]:
        """Waiting sequences, the first of the tenant with the smallest counter next; each tenant's
        stay in the order given. Counters that are charged between two of them count.
        """
        return ordered if len(self._num_waiting) < 2 else self._merged(ordered)

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        """Raises AssertionError if other sequences wait than were told."""
        found: dict[str, int] = {}
        for sequence in waiting:
            name = sequence.tenant.name
            found[name] = found.get(name, 0) + 1
        assert found == self._num_waiting, f"{found} wait, counted {self._num_waiting}"

    def _merged(self, ordered: list[Sequence]) -> Iterator[Sequence]:
        queues: dict[str, deque[tuple[int, Sequence]]] = {}
        for place, sequence in enumerate(ordered):
            queues.setdefault(sequence.tenant.name, deque()).append((place, sequence))
        heads = [(self._counters[name], queue[0][0], name) for name, queue in queues.items()]
        heapq.heapify(heads)
        while heads:
            _, _, name = heapq.heappop(heads)
            _, sequence = queues[name].popleft()
            yield sequence
            if queues[name]:
                heapq.heappush(heads, (self._counters[name], queues[name][0][0], name))

    def _charge(self, tenant: Tenant, service: float) -> None:
        # A counter says nothing while there is no other.
        if len(self._counters) > 1:
            count = self._counters.get(tenant.name, 0.0)
            self._counters[tenant.name] = count + service / tenant.weight

    def _raise_level(self) -> None:
        """To the smallest counter of those that wait. It never falls: a tenant that joins a credit
        below it lowers it for nobody else."""
        names = self._num_waiting or (self._last_left,)
        self._level = max(self._level, min(self._counters.get(name, 0.0) for name in names))

    def _drop_idle(self) -> None:
        """Drops the counters of tenants that would get no less if they came back."""
        self._counters = {
            name: count
            for name, count in self._counters.items()
            if count > self._level or name in self._num_waiting or name == self._last_left
        }
