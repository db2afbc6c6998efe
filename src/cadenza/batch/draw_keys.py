"""Counter-based randomness: a draw's key depends only on request seed and absolute position. The
sampler turns a key and a token id into noise on the device; see `backends.token_choice`. The mixing
function is splitmix64's finaliser (Steele, Lea and Flood, 2014)."""

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_LOW_32 = np.uint64(0xFFFFFFFF)


def draw_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint32]:
    """Keys [L, 2] of the draws at `positions` [L] of streams with `seeds` [L]."""
    return keys_of_mixed(mix_seeds(seeds), positions)


def mix_seeds(seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """[L] The part of a key that does not depend on the position."""
    return _mix(seeds + _GOLDEN)


def keys_of_mixed(
    mixed_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int32]
) -> npt.NDArray[np.uint32]:
    mixed = _mix(mixed_seeds + positions.astype(np.uint64) * _GOLDEN)
    keys = np.empty((len(mixed), 2), np.uint32)
    keys[:, 0] = mixed & _LOW_32
    keys[:, 1] = mixed >> np.uint64(32)
    return keys


def derive_seed(engine_seed: int, request_id: int) -> int:
    state = np.array([engine_seed], np.uint64) * _GOLDEN + np.uint64(request_id)
    return int(_mix(_mix(state))[0] >> np.uint64(1))


def derive_sample_seed(seed: int, sample: int) -> int:
    """The seed of sample `sample` of a request; sample 0 uses the request's seed unchanged."""
    if sample == 0:
        return seed
    state = _mix(np.array([seed], np.uint64) + _GOLDEN) ^ np.uint64(sample)
    return int(_mix(state)[0] >> np.uint64(1))


def _mix(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
