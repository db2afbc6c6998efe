"""Tiny models with a tokenizer, and the command in a process of its own.

Owns the tiny model (random weights, a byte-level tokenizer trained here, a chat template). Nothing
is fetched.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import typer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from typer.main import get_command
from typer.testing import CliRunner

from cadenza.cli.options import with_flags
from cadenza.models.model_config import ModelConfig
from cadenza.models.rope_config import RopeConfig
from tests.checkpoint.config_writer import write_random_checkpoint

TINY = ModelConfig(
    family="llama",
    vocab_size=331,
    hidden_size=24,
    intermediate_size=40,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0, rotary_dim=16),
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    dtype="float32",
    eos_token_ids=(0,),
)
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CORPUS = ("the quick brown fox jumps over the lazy dog", "one two three four five six seven") * 4
LIMITS = ("--max-num-seqs", "4", "--max-model-len", "256", "--num-pages", "64")
# Flags with which the tiny engine compiles once for all tests.
ENGINE = (*LIMITS, "--max-num-batched-tokens", "64")
COMMAND = (sys.executable, "-c", "import sys; from cadenza.cli import main; sys.exit(main())")


@dataclass(frozen=True, slots=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def objects(self) -> list[dict]:
        """Its JSON lines."""
        return [json.loads(line, parse_constant=_refuse) for line in self.out.splitlines()]


Cadenza = Callable[..., Ran]  # runs the command in this process


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """A parameter that is a group of flags; made once, so that its parser is made once."""

    name: str
    kind: Any


@cache
def _parser(*groups: Group) -> tuple[Any, list[dict[str, Any]]]:
    """A command with groups of flags, and what it was called with."""
    seen: list[dict[str, Any]] = []

    def command(**taken: Any) -> None:
        seen.append(taken)

    kind = Parameter.KEYWORD_ONLY
    parameters = [Parameter(group.name, kind, annotation=group.kind) for group in groups]
    vars(command)["__signature__"] = Signature(parameters)
    app = typer.Typer(add_completion=False)
    app.command()(with_flags(command))
    return get_command(app), seen


def taken(
    groups: Sequence[Group], arguments: Sequence[object], env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What a command with these groups of flags makes of its arguments. Raises what it raises."""
    command, seen = _parser(*groups)
    with CliRunner().isolation(env=dict(env or {})):
        try:
            command.main(args=[str(each) for each in arguments], prog_name="c")
        except SystemExit as end:
            if end.code != 0:
                raise
    return seen.pop()


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    statements = {"eos_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(statements))


def write_model(folder: Path, config: ModelConfig = TINY, seed: int = 3) -> Path:
    write_random_checkpoint(config, folder, seed=seed, dtype=config.dtype)
    write_tokenizer(folder, config.vocab_size)
    return folder


def run_cadenza(
    arguments: Sequence[object], *, stdin: str = "", timeout: float = 120, **environment: str
) -> Ran:
    """Runs the command in a process of its own."""
    ran = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )
    return Ran(ran.returncode, ran.stdout, ran.stderr)
