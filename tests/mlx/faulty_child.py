"""The real engine process on MLX, but two tokens make the step that reads them fail; run as a
script."""

import sys
from dataclasses import replace
from typing import Any

from cadenza.batch.step_schema import ModelInputs
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.process.messages import Start
from cadenza.engine.process.worker import OnPhase, Serving, run_child
from cadenza.loading.engine_program import load_engine

RAISE = 2500
EXHAUST = 2501  # its step asks MLX for more memory than there is
TOO_MANY_BYTES = 1 << 50


class FaultyRunner:
    """Everything is the real runner's but `launch`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, inputs: ModelInputs) -> Any:
        import mlx.core as mx

        read = set(inputs.tokens.ids[: inputs.num_tokens].tolist())
        if RAISE in read:
            raise RuntimeError("the device was lost")
        if EXHAUST in read:
            mx.eval(mx.zeros(TOO_MANY_BYTES, mx.uint8) + 1)
        return self._runner.launch(inputs)


def load(start: Start, on_phase: OnPhase) -> Serving:
    serving = load_engine(start, on_phase)
    core = serving.core
    options = CoreOptions(eos_token_ids=core.eos_token_ids)
    return replace(serving, core=EngineCore(FaultyRunner(core.runner), core.limits, options))


if __name__ == "__main__":
    run_child(sys.argv[1:], load)
