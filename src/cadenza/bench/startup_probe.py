"""Run in a process of its own: starts an engine, makes one token, prints when what was done.

`python -m cadenza.bench.startup_probe JSON` with `{"model", "config"}`; the answer is one JSON line
of readings of the monotonic clock, which all processes of a machine share.
"""

import json
import sys
import time
from dataclasses import dataclass, field

PROMPT = "The capital of France is"


@dataclass(slots=True, eq=False)
class _Times:
    """Readings of the clock by the name of what was done then."""

    at_s: dict[str, float] = field(default_factory=dict[str, float])

    def mark(self, name: str) -> None:
        self.at_s[name] = time.monotonic()


def main(text: str) -> None:
    """Prints `{"python", "imports", "load", "compile", "first_token"}`, each in seconds."""
    times = _Times()
    times.mark("python")
    asked = json.loads(text)
    from cadenza import EngineConfig, Request, SamplingParams, Token
    from cadenza.frontend.loaded_model import load_model
    from cadenza.loading.build import describe_backend, find_checkpoint

    config = EngineConfig(**asked["config"])
    # Loads the array library and finds the device.
    describe_backend(config, find_checkpoint(asked["model"], revision=config.revision).config)
    times.mark("imports")
    loaded = load_model(asked["model"], config, times.mark)
    has_text = loaded.checkpoint.tokenizer_path is not None
    prompt = loaded.text.encode(PROMPT if has_text else (0, 1, 2, 3))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    loaded.core.submit(Request(prompt_token_ids=prompt, params=params))
    while not any(isinstance(event, Token) for event in loaded.core.step()):
        pass
    times.mark("first_token")
    print(json.dumps(times.at_s), flush=True)
    loaded.close()


if __name__ == "__main__":
    main(sys.argv[1])
