"""`draw_keys` and `derive_seed`: pure, well spread, and blind to the batch."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cadenza.batch.draw_keys import derive_sample_seed, derive_seed, draw_keys
from cadenza.config import MAX_SEED

SEEDS = st.integers(0, MAX_SEED)
POSITIONS = st.integers(0, 1 << 24)
KNOWN_KEYS = [
    (0xFF3CD4BF, 0x48218226),
    (0x4D197E6F, 0xA706DD2F),
    (0x82C0D5B8, 0xDCE423FC),
    (0xAA963FB8, 0xEC26E94F),
]


def key_of(seed: int, position: int) -> tuple[int, int]:
    (key,) = draw_keys(np.array([seed], np.uint64), np.array([position], np.int32)).tolist()
    return key[0], key[1]


def words_of(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Keys as one 64-bit word each."""
    keys = draw_keys(seeds.astype(np.uint64), positions.astype(np.int32)).astype(np.uint64)
    return keys[:, 0] | keys[:, 1] << np.uint64(32)


def test_known_answers_never_change() -> None:
    # Streams of released versions depend on these: a change here breaks every user's seeds.
    assert [key_of(0, 0), key_of(0, 1), key_of(1, 0), key_of(MAX_SEED, 1 << 24)] == KNOWN_KEYS


@given(draws=st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=9))
def test_a_key_depends_on_its_own_seed_and_position_only(draws: list[tuple[int, int]]) -> None:
    seeds = np.array([seed for seed, _ in draws], np.uint64)
    positions = np.array([position for _, position in draws], np.int32)
    keys = draw_keys(seeds, positions)
    assert keys.dtype == np.uint32
    assert [tuple(key) for key in keys.tolist()] == [key_of(*draw) for draw in draws]


def test_no_two_of_a_million_draws_collide() -> None:
    seeds = np.concatenate(
        [np.arange(500, dtype=np.uint64), MAX_SEED - np.arange(500, dtype=np.uint64)]
    )
    positions = np.arange(1000)
    words = words_of(np.repeat(seeds, len(positions)), np.tile(positions, len(seeds)))
    assert len(np.unique(words)) == len(words) == 1_000_000


def test_neighbouring_seeds_and_positions_share_no_stream() -> None:
    # A sum of seed and position would make stream s + 1 the stream s, one token later.
    words = [set(words_of(np.full(5000, seed), np.arange(5000)).tolist()) for seed in range(20)]
    assert len(set.union(*words)) == 20 * 5000


def flips(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """How often each of the 64 bits differs: [64]."""
    bits = np.unpackbits((before ^ after).view(np.uint8).reshape(len(before), 8), axis=1)
    return bits.mean(axis=0)


def test_flipping_any_bit_of_seed_or_position_flips_half_of_the_key() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, MAX_SEED, 4000, dtype=np.uint64)
    positions = rng.integers(0, 1 << 24, 4000, dtype=np.int32)
    before = words_of(seeds, positions)
    changed = [words_of(seeds ^ np.uint64(1 << bit), positions) for bit in range(63)]
    changed += [words_of(seeds, positions ^ np.int32(1 << bit)) for bit in range(24)]
    for after in changed:
        rates = flips(before, after)
        assert rates.min() > 0.45
        assert rates.max() < 0.55


def test_the_avalanche_check_catches_a_weak_mix() -> None:
    seeds = np.arange(4000, dtype=np.uint64)
    weak = np.uint64(0x9E3779B97F4A7C15)
    rates = flips(seeds * weak, (seeds ^ np.uint64(1 << 40)) * weak)
    assert not (rates.min() > 0.45 and rates.max() < 0.55)


@given(engine_seed=SEEDS, request_id=st.integers(0, 1 << 40))
def test_a_derived_seed_is_a_valid_seed_and_a_function_of_both(
    engine_seed: int, request_id: int
) -> None:
    seed = derive_seed(engine_seed, request_id)
    assert 0 <= seed <= MAX_SEED
    assert seed == derive_seed(engine_seed, request_id)
    assert seed != derive_seed(engine_seed, request_id + 1)


def test_derived_seeds_of_neighbouring_engines_and_requests_differ() -> None:
    seeds = {derive_seed(engine, request) for engine in range(100) for request in range(200)}
    assert len(seeds) == 100 * 200


def test_samples_have_seeds_of_their_own_and_the_first_has_the_requests() -> None:
    seeds = [derive_sample_seed(seed, sample) for seed in range(50) for sample in range(16)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    assert [derive_sample_seed(seed, 0) for seed in range(50)] == list(range(50))
    requests = {derive_seed(seed, request_id) for seed in range(50) for request_id in range(50)}
    assert not requests & set(seeds[1::2]), "another request's seed"
