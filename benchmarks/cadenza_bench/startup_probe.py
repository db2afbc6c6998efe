"""`python -m cadenza_bench.startup_probe JSON`, of `{"model", "config"}`: starts an engine,
generates a token, and prints readings of the monotonic clock, which all processes of a machine
share, by phase. Not in `startup`, whose imports would count as the start of Python.
"""

import json
import sys
import time

PROMPT = "The capital of France is"


def measure_start(argument: str) -> dict[str, float]:
    """Seconds at the end of `startup.PHASES`."""
    at_s: dict[str, float] = {}

    def mark(phase: str) -> None:
        at_s[phase] = time.monotonic()

    mark("python")
    asked = json.loads(argument)
    from cadenza import EngineConfig, Request, SamplingParams, Token
    from cadenza.frontend.loaded_model import load_model
    from cadenza.loading.build import describe_backend, find_configured

    config = EngineConfig(**asked["config"])
    # Loads the array library and finds the device.
    describe_backend(config, find_configured(asked["model"], config))
    mark("imports")
    loaded = load_model(asked["model"], config, mark)
    has_text = loaded.checkpoint.tokenizer_source is not None
    prompt = loaded.text.encode(PROMPT if has_text else (0, 1, 2, 3))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    loaded.core.submit(Request(prompt_token_ids=prompt, params=params))
    while not any(isinstance(event, Token) for event in loaded.core.step()):
        pass
    mark("first_token")
    loaded.close()
    return at_s


if __name__ == "__main__":
    print(json.dumps(measure_start(sys.argv[1])), flush=True)
