"""`seed_of_sample`: the seed with which a sample's tokens are drawn."""

from cadenza.batch.draw_keys import derive_sample_seed, derive_seed
from cadenza.request import SamplingParams


def seed_of_sample(
    params: SamplingParams, sample: int, *, request_id: int, engine_seed: int
) -> int:
    """That of a request of one sample with the same tokens; without a seed in `params` from the
    engine's seed and the request's id."""
    seed = derive_seed(engine_seed, request_id) if params.seed is None else params.seed
    return derive_sample_seed(seed, sample)
