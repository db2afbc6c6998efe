"""Measures how many drafts of the bundled model's drafters are accepted, through the engine.

Prompts are those of held-out examples, and answers the model's own, greedy and sampled.  Drafts are
made whatever they cost.  A draft counts if its place was reached: if the ones before it were
accepted and the answer did not end before it.

Run as `python -m training.acceptance` from the root of the repository, for a table.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cadenza.checkpoint.folder import Checkpoint
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.config import EngineConfig
from cadenza.engine.core import CoreOptions, EngineCore
from cadenza.events import Finished, Token
from cadenza.loading.build import load_runners, open_planned
from cadenza.request import Request, SamplingParams
from cadenza.speculative_config import SpeculativeConfig
from training.corpus.example import Split
from training.corpus.mixture import SHARES, make_example, open_source
from training.export import BUNDLED_DRAFT
from training.prompts import prompt_of
from training.tokenizer import BUNDLED, load_tokenizer

DEPTHS = 3
TEMPERATURES = (0.0, 0.7)
PROMPT_TOKENS, ANSWER_TOKENS = 300, 80
ROWS = 8

Prompts = dict[str, list[list[int]]]
"""Token ids, by task."""


@dataclass(slots=True, eq=False)
class Reached:
    """Drafts whose place was reached, by depth, and how many of them were accepted."""

    tried: list[int] = field(default_factory=lambda: [0] * DEPTHS)
    accepted: list[int] = field(default_factory=lambda: [0] * DEPTHS)

    def add(self, tokens: Iterable[Token]) -> None:
        """The tokens of one answer."""
        depth = 0
        for token in tokens:
            if token.is_draft or token.num_rejected_drafts:
                self.tried[depth] += 1
                self.accepted[depth] += token.is_draft
            depth = depth + 1 if token.is_draft else 0

    @property
    def shares(self) -> list[float | None]:
        """Accepted of those tried, by depth; None if there were none."""
        pairs = zip(self.accepted, self.tried, strict=True)
        return [round(accepted / tried, 3) if tried else None for accepted, tried in pairs]


def held_out_prompts(number: int) -> Prompts:
    """As many of each task, of at most `PROMPT_TOKENS` and a few."""
    tokenizer = load_tokenizer()
    found: Prompts = {}
    for task in SHARES:
        sources = [open_source(Split.HELD_OUT, "acceptance", task, i) for i in range(number)]
        examples = [make_example(task, each, max_tokens=PROMPT_TOKENS) for each in sources]
        texts = [prompt_of(example, index) for index, example in enumerate(examples)]
        found[task] = [tokenizer.encode(text).ids for text in texts]
    return found


def measure_acceptance(
    folder: Path, speculation: SpeculativeConfig, prompts: Prompts
) -> dict[str, Any]:
    """Shares of accepted drafts by temperature, task and depth."""
    config = EngineConfig(
        speculative_config=speculation, max_num_seqs=ROWS, max_model_len=1024, seed=0
    )
    engine = open_planned(folder, config)
    checkpoint, plan = engine.checkpoint, engine.plan
    with closing(load_runners(engine)) as runners:
        runners.warmup()
        options = CoreOptions(
            eos_token_ids=frozenset(checkpoint.eos_token_ids),
            speculation=speculation,
            draft_model=runners.draft,
        )
        core = EngineCore(runners.target, plan.limits, options)
        return {
            str(temperature): _by_task(core, prompts, temperature) for temperature in TEMPERATURES
        }


def _by_task(core: EngineCore, prompts: Prompts, temperature: float) -> dict[str, Any]:
    shares: dict[str, Any] = {}
    of_all = Reached()
    for task, of_task in prompts.items():
        reached = Reached()
        for tokens in _answers(core, of_task, temperature):
            reached.add(tokens)
            of_all.add(tokens)
        shares[task] = reached.shares
    return {**shares, "all": of_all.shares}


def _answers(
    core: EngineCore, prompts: Sequence[list[int]], temperature: float
) -> list[list[Token]]:
    """The tokens of the answer to each prompt; as many run at a time as there are rows."""
    answers: dict[int, list[Token]] = {}
    waiting = list(enumerate(prompts))
    num_running = 0
    while waiting or num_running:
        while waiting and num_running < ROWS:
            index, prompt = waiting.pop()
            params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=temperature, seed=index)
            answers[core.submit(Request(prompt_token_ids=tuple(prompt), params=params))] = []
            num_running += 1
        for event in core.step():
            if isinstance(event, Token):
                answers[event.request_id].append(event)
            elif isinstance(event, Finished):
                num_running -= 1
    return list(answers.values())


def acceptance_of(folder: Path, draft: Path, number: int) -> dict[str, Any]:
    """Of the MTP layer of the model in `folder` and of the model in `draft`, if they are there."""
    prompts = held_out_prompts(number)
    found: dict[str, Any] = {}
    for name, speculation in _drafters(open_checkpoint(folder), draft):
        found[name] = measure_acceptance(folder, speculation, prompts)
    return found


def _drafters(checkpoint: Checkpoint, draft: Path) -> Iterable[tuple[str, SpeculativeConfig]]:
    if checkpoint.config.num_mtp_layers:
        yield "mtp", SpeculativeConfig(method="mtp", num_speculative_tokens=DEPTHS)
    if draft.exists():
        yield (
            "draft_model",
            SpeculativeConfig(
                method="draft_model", model=str(draft), num_speculative_tokens=DEPTHS
            ),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=BUNDLED)
    parser.add_argument("--draft", type=Path, default=BUNDLED_DRAFT)
    parser.add_argument("--number", type=int, default=25, help="prompts of each task")
    arguments = parser.parse_args()
    found = acceptance_of(arguments.folder, arguments.draft, arguments.number)
    for name, by_temperature in found.items():
        for temperature, by_task in by_temperature.items():
            print(f"{name}, temperature {temperature}")
            for task, shares in by_task.items():
                print(f"  {task:12} {json.dumps(shares)}")


if __name__ == "__main__":
    main()
