"""The real engine process, but a step that reads the token `RAISE` fails; run as a script."""

import sys
import time
from typing import Any

from cadenza.batch.step_schema import ModelInputs
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.engine.process.messages import Start
from cadenza.engine.process.worker import OnPhase, Serving, run_child
from cadenza.frontend.loaded_model import load_model

RAISE = 2500
STEP_S = 0.02  # so that there is time to meet streams before they end


class FaultyRunner:
    """Everything is the real runner's but `launch`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, inputs: ModelInputs) -> Any:
        if RAISE in inputs.tokens.ids[: inputs.rows.query_starts[-1]]:
            raise RuntimeError("the device was lost")
        time.sleep(STEP_S)
        return self._runner.launch(inputs)


def load(start: Start, on_phase: OnPhase) -> Serving:
    on_phase("load")
    core = load_model(start.model, start.config).core
    return Serving(core=EngineCore(FaultyRunner(core.runner), core.limits, CoreOptions()))


if __name__ == "__main__":
    run_child(sys.argv[1:], load)
