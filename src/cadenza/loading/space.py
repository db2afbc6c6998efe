"""`Space`: the memory of a plan, and how it is divided into rows, steps and the KV pool. Pure
arithmetic. What was divided never exceeds what is available; what cannot fit is refused with the
flag to set and its value, or with the missing bytes where no value would do."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor

from cadenza.backends.base import CompiledSizes
from cadenza.batch.step_schema import NUM_EXTRA_LOGIT_ROWS
from cadenza.batch.whole_spans import least_budget
from cadenza.config import (
    MAX_NUM_SEQS_BOUND,
    PAGE_SIZE_UNIT,
    EngineConfig,
    EngineLimits,
    Quantization,
)
from cadenza.errors import ConfigError, show_missing, show_size
from cadenza.loading.footprint import Footprint

POOL_SHARE = 0.5  # largest share of what everything else leaves that the KV pool takes by default

EXPECTED_TOKENS = 1024  # prompt and answer of a request, for `--max-num-seqs auto`

# The largest share of the available memory that an advised size takes, if any size fits it: free
# memory changes from one moment to the next
ADVISED_SHARE = 0.98

SNAPSHOT_SHARE = 0.25  # largest share of what is left, for state slots beyond those of rows

SLOTS_PER_ROW = 2  # of recurrent state, to advance a row: that from which it starts, and its own

LEAST_SNAPSHOTS = 16  # by default as many snapshots as rows, but at least so many

GB = 1e9


def default_step_tokens(budget: int, whole_span: int, num_rows: int) -> int:
    """The default token budget of a step, at least a token for each row."""
    return max(budget, least_budget(max(1, whole_span), num_rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """An engine's memory in bytes, with a longest context of `context` tokens. `terms` depend on
    it; `budget` is the token budget of a step, `whole_span` the tokens of an image block that one
    step must hold, `state_bytes` those of a slot of recurrent state, `image_bytes` of all that
    images take."""

    config: EngineConfig
    available_bytes: int
    headroom_bytes: int
    weight_bytes: int
    weights_name: str
    kv_bytes_per_token: int
    terms: Footprint
    context: int
    budget: int
    is_dense: bool
    state_bytes: int = 0
    whole_span: int = 0
    image_bytes: int = 0

    def at(self, context: int) -> "Space":
        return replace(self, context=context)

    @property
    def advised(self) -> "Space":
        return replace(self, available_bytes=int(self.available_bytes * ADVISED_SHARE))

    @property
    def footprint(self) -> Footprint:
        return self.terms.at(self.context, self.config.page_size)

    @property
    def slot_bytes(self) -> int:
        return max(1, self.kv_bytes_per_token + self.footprint.slot_bytes)

    @property
    def base_bytes(self) -> int:
        """What is taken whatever the sizes."""
        footprint = self.footprint
        return (
            self.weight_bytes
            + self.image_bytes
            + footprint.process_bytes
            + footprint.front_end_bytes
            + footprint.bodies_bytes
            + footprint.fixed_bytes
        )

    @property
    def left_bytes(self) -> int:
        """For rows, steps and the pool."""
        return self.available_bytes - self.headroom_bytes - self.base_bytes

    def beside_pool(self, num_rows: int) -> int:
        """Bytes of rows and of the largest step."""
        footprint = self.footprint
        state_bytes = SLOTS_PER_ROW * self.state_bytes
        return (
            num_rows * (footprint.row_bytes + footprint.request_bytes + state_bytes)
            + self.step_tokens(num_rows) * footprint.step_token_bytes
        )

    def step_tokens(self, num_rows: int) -> int:
        """The token budget; each row has a token, unless a budget was asked for."""
        own = default_step_tokens(self.budget, self.whole_span, num_rows)
        return self.config.max_num_batched_tokens or own

    def least_pool_bytes(self, num_rows: int) -> int:
        """The memory that must remain beside rows and steps: one page, or a block for each row."""
        num_tokens = self.config.page_size * (num_rows if self.is_dense else 1)
        is_sized = self.config.num_pages or self.config.kv_cache_memory_bytes
        return ceil(num_tokens * self.slot_bytes / (1 if is_sized else POOL_SHARE))

    def needs_bytes(self, num_rows: int) -> int:
        beside = self.beside_pool(num_rows) + self.least_pool_bytes(num_rows)
        return self.headroom_bytes + self.base_bytes + beside

    def fits(self, num_rows: int) -> bool:
        """Whether so many rows fit, with a page each step."""
        return self.needs_bytes(num_rows) <= self.available_bytes

    def pool_fits(self, num_rows: int) -> bool:
        """Whether beside so many rows the pool holds the longest context, for each dense row; if
        one was asked for, its last token needs no KV, unless a row has a block."""
        wanted, most = _tokens_for_pool(self, num_rows)
        page_size = self.config.page_size
        each = wanted // (num_rows if self.is_dense else 1) // page_size * page_size
        spared = 1 if self.config.max_model_len is not None and not self.is_dense else 0
        return self.fits(num_rows) and wanted <= most and self.context <= each + spared


def check_positions(wanted: int | None, trained: int) -> None:
    if wanted is not None and wanted > trained:
        raise ConfigError(
            f"--max-model-len {wanted} is above the model's {trained} positions; "
            f"set --max-model-len {trained}"
        )


def check_base(space: Space, coarser: Callable[[Quantization], int | None]) -> None:
    """Raises ConfigError if there is no room for one row with one page. `coarser` gives the bytes
    of the weights in a quantization; None if it is no coarser."""
    needed = space.needs_bytes(1)
    if needed <= space.available_bytes:
        return
    _check_base_context(space)
    fault = (
        f"the weights need {show_size(space.weight_bytes)} as {space.weights_name}, the processes "
        f"and the smallest step and pool "
        f"{show_size(needed - space.headroom_bytes - space.weight_bytes)}, but "
        f"{show_size(space.available_bytes)} are available"
    )
    room = space.available_bytes - (needed - space.headroom_bytes)
    if room >= 0:
        cautious = room - space.available_bytes + space.advised.available_bytes
        room = cautious if cautious >= 0 else room
        raise ConfigError(
            f"--scheduler-headroom-gb {space.config.scheduler_headroom_gb:g} leaves no memory for "
            f"KV: {fault}; set --scheduler-headroom-gb {_floor_gb(room):g}"
        )
    tokens = space.config.max_num_batched_tokens
    if tokens is not None:
        over = (needed - each.available_bytes for each in (space.advised, space))
        fitting = [tokens - -(-num_bytes // _at_least_1(space)) for num_bytes in over]
        if max(fitting) >= 1:
            raise ConfigError(
                f"--max-num-batched-tokens {tokens} needs {show_size(space.beside_pool(1))} for a "
                f"step, but {fault}; set --max-num-batched-tokens "
                f"{fitting[0] if fitting[0] >= 1 else fitting[1]}"
            )
    for quantization in ("int8", "int4"):
        weight_bytes = coarser(quantization)
        if weight_bytes is None:
            continue
        smaller = replace(space, weight_bytes=weight_bytes)
        if smaller.needs_bytes(1) <= space.available_bytes:
            raise ConfigError(f"{fault}; set --quantization {quantization}")
    raise ConfigError(
        f"{fault}; free {show_missing(needed - space.available_bytes)}, raise the limit, or choose "
        f"{_smaller_model(space.weight_bytes - (needed - space.advised.available_bytes))}"
    )


def _smaller_model(weight_bytes: int) -> str:
    if weight_bytes <= 0:
        return "a smaller model"
    return f"a model or a file with fewer bits whose weights take at most {show_size(weight_bytes)}"


def _check_base_context(space: Space) -> None:
    config, page_size = space.config, space.config.page_size
    wanted = config.max_model_len
    if wanted is None or wanted <= page_size or not space.at(page_size).fits(1):
        return
    more_bytes = space.needs_bytes(1) - space.at(page_size).needs_bytes(1)
    raise ConfigError(
        f"--max-model-len {wanted} needs {show_size(more_bytes)} beside its KV, more than is left "
        f"of the {show_size(space.available_bytes)} that are available; set --max-model-len "
        f"{advised_context(space, config.max_num_seqs or 1, wanted)}"
    )


def check_rows(space: Space, num_rows: int) -> None:
    """Raises ConfigError unless so many rows fit with a page each step; one does."""
    if space.fits(num_rows):
        return
    fitting = largest(num_rows, _cautious(space, lambda each: each.fits(1)).fits)
    raise ConfigError(
        f"{num_rows} rows need {show_size(space.beside_pool(num_rows))} beside their KV, but the "
        f"weights and the processes leave {show_size(space.left_bytes)}; set --max-num-seqs "
        f"{fitting}"
    )


def check_compiled(limits: EngineLimits, most: CompiledSizes | None) -> None:
    """Raises ConfigError for more tokens than programs were compiled for."""
    if most is None:
        return
    for name, given, bound in (
        ("max-model-len", limits.max_model_len, most.max_model_len),
        ("max-num-batched-tokens", limits.max_num_batched_tokens, most.num_tokens),
    ):
        if given > bound:
            raise ConfigError(
                f"--{name} {given} is above the {bound} that the compiled modules take; set "
                f"--{name} {bound}, or export the model for more (cadenza export)"
            )


def choose_rows(space: Space, context: int) -> tuple[int, str]:
    """`max_num_seqs` where none was asked for, and why: as many requests of `EXPECTED_TOKENS` as
    the pool holds, each with a token in a step; of `context` tokens where each row has its own
    block."""
    expected = context if space.is_dense else min(context, EXPECTED_TOKENS)
    most = min(space.step_tokens(1), MAX_NUM_SEQS_BOUND)

    def fits(num_rows: int) -> bool:
        if not space.fits(num_rows):
            return False
        wanted, fitting = _tokens_for_pool(space, num_rows)
        return num_rows * expected <= wanted <= fitting

    num_rows = largest(most, fits)
    if not fits(num_rows):
        return num_rows, f"the KV pool has no room for a request of {expected} tokens"
    if num_rows == most:
        return num_rows, f"a step has {most} tokens"
    return num_rows, f"the KV pool has room for so many requests of {expected} tokens"


def pool_tokens(space: Space, num_rows: int) -> int:
    """The largest number of tokens of the pool. Raises ConfigError if one was asked for that does
    not fit."""
    config = space.config
    wanted, most = _tokens_for_pool(space, num_rows)
    if wanted <= most:
        return wanted
    least = config.page_size * (num_rows if space.is_dense else 1)
    cautious = _cautious(space, lambda each: _tokens_for_pool(each, num_rows)[1] >= least)
    _, most = _tokens_for_pool(cautious, num_rows)
    given = f"--kv-cache-memory-bytes {config.kv_cache_memory_bytes}"
    fitting = f"--kv-cache-memory-bytes {most * space.kv_bytes_per_token}"
    if config.num_pages is not None:
        given = f"--num-pages {config.num_pages}"
        fitting = f"--num-pages {most // config.page_size}"
    raise ConfigError(
        f"{given} needs {show_size(wanted * space.slot_bytes)}, but the weights and the rest leave "
        f"{show_size(space.left_bytes - space.beside_pool(num_rows))}; set {fitting}"
    )


def _tokens_for_pool(space: Space, num_rows: int) -> tuple[int, int]:
    """The tokens of the pool, and the most that fit."""
    config = space.config
    left = space.left_bytes - space.beside_pool(num_rows)
    most = left // space.slot_bytes
    if config.num_pages is not None:
        return config.num_pages * config.page_size, most
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // max(space.kv_bytes_per_token, 1), most
    return int(left * POOL_SHARE) // space.slot_bytes, most


def state_slots(space: Space, num_rows: int, pool_bytes: int) -> int:
    """Slots of recurrent state beside a pool: what the rows need, and as many for snapshots and
    drafts as fit; 0 for a model without recurrent state."""
    if not space.state_bytes:
        return 0
    config = space.config
    wanted = config.max_state_snapshots
    if not config.enable_prefix_caching or space.is_dense:
        wanted = 0
    elif wanted is None:
        wanted = max(num_rows, LEAST_SNAPSHOTS)
    if config.speculation is not None:
        num_drafts = num_rows * config.speculation.num_speculative_tokens
        wanted += min(num_drafts, NUM_EXTRA_LOGIT_ROWS)
    left = space.left_bytes - space.beside_pool(num_rows)
    room = min(int(left * SNAPSHOT_SHARE), left - pool_bytes)
    return SLOTS_PER_ROW * num_rows + min(wanted, max(0, room) // space.state_bytes)


def bytes_left(space: Space, limits: EngineLimits) -> int:
    at = space.at(limits.max_model_len)
    pool_bytes = limits.num_pages * limits.page_size * at.slot_bytes
    more_slots = limits.num_state_slots - SLOTS_PER_ROW * limits.max_num_seqs
    state_bytes = max(0, more_slots) * space.state_bytes
    return at.left_bytes - at.beside_pool(limits.max_num_seqs) - pool_bytes - state_bytes


def largest_context(space: Space, num_rows: int, most: int) -> int:
    """The longest context of whole pages, or `most`, that fits the memory and the pool; at least a
    page."""
    page_size = space.config.page_size

    def context(num_pages: int) -> int:
        return min(most, num_pages * page_size)

    return context(
        largest(-(-most // page_size), lambda pages: space.at(context(pages)).pool_fits(num_rows))
    )


def advised_context(space: Space, num_rows: int, wanted: int) -> int:
    """The longest context below `wanted` to advise."""
    page = min(wanted, space.config.page_size)
    cautious = _cautious(space, lambda each: each.at(page).pool_fits(num_rows))
    return largest(wanted, lambda context: cautious.at(context).pool_fits(num_rows))


def choose_context(space: Space, num_rows: int, num_tokens: int) -> int:
    """`max_model_len` for a pool of `num_tokens`: that of `space`. Raises ConfigError if no page
    for each row fits, or not the context that was asked for."""
    config, page_size = space.config, space.config.page_size
    sharing = num_rows if space.is_dense else 1
    fitting = num_tokens // sharing // page_size * page_size
    if fitting < 1:
        raise ConfigError(
            f"the KV pool fits {num_tokens} tokens, less than one page of {page_size} for each "
            f"row; set {_pool_flag(space, sharing * page_size)}"
        )
    wanted = config.max_model_len
    if wanted is None:
        return space.context
    # The last token of a request gets no KV, so its context needs one slot less; a block for each
    # row has whole units all the same.
    most = fitting if space.is_dense else fitting + 1
    if wanted > most:
        needed = -(-(wanted - 1) // PAGE_SIZE_UNIT) * PAGE_SIZE_UNIT
        also = ""
        left = space.left_bytes - space.beside_pool(num_rows)
        if -(-needed // page_size) * page_size * sharing * space.slot_bytes <= left:
            also = f", or {_pool_flag(space, -(-needed // page_size) * page_size * sharing)}"
        advised = advised_context(space, num_rows, wanted)
        raise ConfigError(
            f"--max-model-len {wanted} needs KV for {wanted - 1} tokens, but a request can have "
            f"{fitting}; set --max-model-len {advised}{also}"
        )
    return wanted


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to `most` that fits; `fits` is monotonic, and 1 fits."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _cautious(space: Space, has_room: Callable[[Space], bool]) -> Space:
    """The space that advice relies on: with a little less memory, if that `has_room`."""
    return space.advised if has_room(space.advised) else space


def _pool_flag(space: Space, num_tokens: int) -> str:
    if space.config.num_pages is not None:
        return f"--num-pages {-(-num_tokens // space.config.page_size)}"
    return f"--kv-cache-memory-bytes {num_tokens * max(1, space.kv_bytes_per_token)}"


def _at_least_1(space: Space) -> int:
    return max(1, space.footprint.step_token_bytes)


def _floor_gb(num_bytes: int) -> float:
    return floor(num_bytes / GB * 1000) / 1000
