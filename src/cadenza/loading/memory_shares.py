"""`memory_shares`: how memory is divided among engines that run side by side. Pure arithmetic; the
shares of any models that may be loaded at the same time never exceed what is available."""

from collections.abc import Sequence

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.tensor_formats import held_formats, stored_bytes
from cadenza.config import EngineConfig
from cadenza.errors import ConfigError
from cadenza.models.declaration import declare


def memory_shares(weight_bytes: Sequence[int], num_engines: int, available_bytes: int) -> list[int]:
    """Each model's bytes: its weights, and an equal share of what the largest `num_engines` models
    leave. Raises ConfigError where these weights alone exceed what is available."""
    ordered = sorted(weight_bytes, reverse=True)
    rest_bytes = available_bytes - sum(ordered[:num_engines])
    if rest_bytes > 0:
        return [each + rest_bytes // num_engines for each in weight_bytes]
    fitting = num_engines
    while fitting > 1 and sum(ordered[:fitting]) >= available_bytes:
        fitting -= 1
    raise ConfigError(
        f"--max-loaded-models {num_engines}: the weights of the {num_engines} largest models take "
        f"{sum(ordered[:num_engines])} bytes, but {available_bytes} are available; set "
        f"--max-loaded-models {fitting}, or choose a --quantization (each of the --replicas of a "
        f"model counts as one)"
    )


def weight_bytes_of(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Approximate bytes of a model's weights; 0 where only a backend can read them."""
    if not checkpoint.is_known:
        return 0
    if config.quantization == "none":
        return checkpoint.num_weight_bytes
    model = checkpoint.config
    formats = held_formats(model, checkpoint.weights)
    return stored_bytes(declare(model), "bfloat16", config.quantization, formats)
