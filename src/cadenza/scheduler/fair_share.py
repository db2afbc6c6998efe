"""`FairShare`: which tenant is next (VTC, Sheng et al., arXiv 2401.00588: service counters by
weight), and `UnderShareTenants`: what they may preempt. While two tenants wait, their services
differ by at most 2 max(w_p L, w_q M) + C: costs of a prompt and an output token, tokens of a prompt
and the pool, the credit. No sequence of a tenant under its share is preempted for another's."""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from cadenza.batch.batch import BatchEntry
from cadenza.batch.sequence import Sequence
from cadenza.batch.step_cost import StepBound, StepCost, full_decode
from cadenza.config import EngineLimits
from cadenza.tenant import Tenant

# Steps full of prompt tokens that a tenant below its share may save up, so that close prompts need
# not wait for others.
CREDIT_STEPS = 4

# Above so many counters, those that a tenant would get anyway when it comes back are dropped.
MAX_COUNTERS = 1024

# Of an output token's cost: prompts are not free where measured times are too noisy to tell.
LEAST_PROMPT_COST = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCost:
    """What computing a token of a prompt costs, and generating a token; in any one unit."""

    prompt: float = 1.0
    output: float = 2.0


def measured_service_cost(cost: StepCost, num_rows: int) -> ServiceCost:
    """In milliseconds: a prompt token alongside others, and a row of a step in which all decode."""
    output_ms = cost.predict_ms(full_decode(num_rows)) / num_rows
    return ServiceCost(prompt=max(cost.token_ms, LEAST_PROMPT_COST * output_ms), output=output_ms)


def fair_share_of(bound: StepBound | None, limits: EngineLimits) -> "FairShare":
    """With the costs measured so far as weights of tokens, if there are any."""
    cost = ServiceCost()
    if bound is not None:
        cost = measured_service_cost(bound.cost, limits.max_num_seqs)
    return FairShare(cost, cost.prompt * CREDIT_STEPS * limits.max_num_batched_tokens)


class FairShare:
    """Counters of one scheduler's tenants; a joining one's may be `credit` below the others'."""

    def __init__(self, cost: ServiceCost | None = None, credit: float = 0.0) -> None:
        self._cost = cost or ServiceCost()
        self._credit = credit
        self._counters: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}
        self._level = 0.0
        self._last_left = ""

    @property
    def waiting_names(self) -> Iterable[str]:
        return self._num_waiting

    def join(self, tenant: Tenant) -> None:
        """A tenant's first waiting sequence lifts its counter to the level, less the credit, so
        that idle tenants save up nothing."""
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
        name = tenant.name
        self._num_waiting[name] -= 1
        if not self._num_waiting[name]:
            del self._num_waiting[name]
            self._last_left = name

    def counter_of(self, sequence: Sequence) -> float:
        return self._counters.get(sequence.tenant.name, 0.0)

    def charge_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        self._charge(sequence.tenant, self._cost.prompt * num_tokens)

    def charge_outputs(self, entries: Iterable[BatchEntry]) -> None:
        """A draft, or a token that was not sampled, costs as much as a prompt token."""
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
        self._charge(sequence.tenant, milliseconds)

    def charge_tokens(self, sequence: Sequence, num_tokens: float) -> None:
        self._charge(sequence.tenant, self._cost.prompt * num_tokens)

    def in_turns(self, ordered: list[Sequence]) -> Iterable[Sequence]:
        """Waiting sequences by their tenants' smallest counter; charges in between count."""
        return ordered if len(self._num_waiting) < 2 else self._merged(ordered)

    def check_invariants(self, waiting: Iterable[Sequence]) -> None:
        found: dict[str, int] = {}
        for sequence in waiting:
            name = sequence.tenant.name
            found[name] = found.get(name, 0) + 1
        assert found == self._num_waiting, f"{found} wait, counted {self._num_waiting}"

    def _merged(self, ordered: list[Sequence]) -> Iterator[Sequence]:
        queues: dict[str, deque[tuple[int, Sequence]]] = {}
        for index, sequence in enumerate(ordered):
            queues.setdefault(sequence.tenant.name, deque()).append((index, sequence))
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
        """To the smallest waiting counter; never falls when a tenant joins below it."""
        names = self._num_waiting or (self._last_left,)
        self._level = max(self._level, min(self._counters.get(name, 0.0) for name in names))

    def _drop_idle(self) -> None:
        self._counters = {
            name: count
            for name, count in self._counters.items()
            if count > self._level or name in self._num_waiting or name == self._last_left
        }


# Below `WHOLE_AFTER_PREEMPTIONS`, so that this alone never makes a sequence wait for pages of
# complete outputs.
MAX_DISPLACEMENTS = 2


class UnderShareTenants:
    """Of one scheduler, with the rows and pages of `limits`."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self._num_open: Counter[str] = Counter()
        self._total_open = 0
        self._weights: dict[str, float] = {}
        self._total_weight = 0.0

    def open(self, tenant: Tenant) -> None:
        self._num_open[tenant.name] += 1
        self._total_open += 1
        if self._weights.get(tenant.name) != tenant.weight:
            self._weights[tenant.name] = tenant.weight
            self._total_weight = sum(self._weights.values())

    def close(self, tenant: Tenant) -> None:
        name = tenant.name
        self._num_open[name] -= 1
        self._total_open -= 1
        if not self._num_open[name]:
            del self._num_open[name], self._weights[name]
            self._total_weight = sum(self._weights.values())

    def is_under_share(self, name: str) -> bool:
        """Whether the tenant's open sequences fit its share of the rows in use."""
        if len(self._num_open) < 2 or name not in self._num_open:
            return False
        num_rows = min(self._limits.max_num_seqs, self._total_open)
        return self._num_open[name] <= self._share_of(name, num_rows)

    def has_any(self, names: Iterable[str]) -> bool:
        return len(self._num_open) > 1 and any(map(self.is_under_share, names))

    def preemptable_for(
        self, sequence: Sequence, running: SequenceOf[Sequence], *, lacks_row: bool
    ) -> list[Sequence]:
        """Running sequences of tenants above their share that a waiting one may preempt for a row
        or for pages; none unless its own tenant is, with it, within its share."""
        name = sequence.tenant.name
        if not self.is_under_share(name):
            return []
        if lacks_row:
            return self._above_share(running, lambda _: 1, self._limits.max_num_seqs)
        held = sum(len(each.page_table) for each in running if each.tenant.name == name)
        wanted = held + -(-sequence.num_tokens // self._limits.page_size)
        num_pages = self._limits.num_pages
        if wanted > self._share_of(name, num_pages):
            return []
        return self._above_share(running, lambda each: len(each.page_table), num_pages)

    def check_invariants(self, sequences: list[Sequence]) -> None:
        found = Counter(each.tenant.name for each in sequences)
        assert found == self._num_open, f"{found} are open, counted {self._num_open}"

    def _above_share(
        self, running: SequenceOf[Sequence], size_of: Callable[[Sequence], int], total: int
    ) -> list[Sequence]:
        sizes: Counter[str] = Counter()
        for each in running:
            sizes[each.tenant.name] += size_of(each)
        above = {name for name, size in sizes.items() if size > self._share_of(name, total)}
        return [
            each
            for each in running
            if each.tenant.name in above
            and not self.is_under_share(each.tenant.name)
            and each.num_preemptions < MAX_DISPLACEMENTS
        ]

    def _share_of(self, name: str, total: int) -> float:
        return max(1.0, total * self._weights[name] / self._total_weight)
