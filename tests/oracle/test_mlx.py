"""Greedy streams on MLX beside those on XLA and those of mlx-lm's own `generate_step`.

Implementations round differently, so two streams may part where the two largest logits are nearly
equal. Such places are counted and printed; elsewhere streams must be equal.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from cadenza import LLM, SamplingParams
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.text import Tokenizer
from tests.contract.backends import needs_mlx

pytestmark = [pytest.mark.oracle, needs_mlx]

NEAR_TIE = 1e-4
"""Of two logits."""

NUM_PROMPTS = 200
NUM_TOKENS = 24
NUM_REAL_TOKENS = 24
REAL_PROMPTS = (
    "The capital of Japan is",
    "Once upon a time, in a small village by the sea, there lived",
    "def fibonacci(n):",
    "Water boils at",
)

PLACES = "France Japan Italy Spain Egypt Peru Kenya Norway Cuba Chile".split()
TOPICS = "fox,bear,king,boat,garden,robot,teacher,star,dog,river".split(",")
STARTS = (
    "Once upon a time there was a",
    "Tell me a story about a",
    "Tom and Anna went to see the",
    "A long story about the",
    "Who has seen the",
)


def prompts() -> Iterator[str]:
    yield from (f"The capital of {place} is" for place in PLACES)
    yield from (f"{start} {topic}" for start, topic in itertools.product(STARTS, TOPICS))
    yield from (f"{n} {sign} {n * 7 % 23} =" for n in range(1, 70) for sign in "+-*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """mlx-lm's greedy stream, with the gap between the two largest logits of each token."""

    token_ids: list[int]
    gaps: list[float]

    def check(self, other: list[int], what: str) -> bool:
        """Whether a stream is this one; one that parts elsewhere than at a near tie fails."""
        pairs = zip(self.token_ids, other, strict=False)
        place = next((at for at, pair in enumerate(pairs) if pair[0] != pair[1]), None)
        if place is None:
            assert len(self.token_ids) == len(other), what
            return True
        assert self.gaps[place] <= NEAR_TIE, f"{what}: token {place}, gap {self.gaps[place]}"
        return False


def own_streams(folder: Path, dtype: str | None, ids: list[list[int]], count: int) -> list[Own]:
    wanted = {"folder": str(folder), "dtype": dtype, "prompts": ids, "max_tokens": count}
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("mlx_lm_generate.py"))],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=True,
    )
    streams = json.loads(ran.stdout)
    return [Own(token_ids=[t for t, _ in each], gaps=[gap for _, gap in each]) for each in streams]


def greedy(llm: LLM, texts: list[str], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [list(each.outputs[0].token_ids) for each in llm.generate(texts, params)]


def ids_of(folder: Path, texts: list[str]) -> list[list[int]]:
    source = open_checkpoint(folder).tokenizer_source
    assert source is not None
    tokenizer = Tokenizer(source)
    return [tokenizer.encode(text) for text in texts]


def test_200_prompts_are_answered_alike_by_xla_mlx_and_mlx_lm():
    folder = open_checkpoint(None).folder
    texts = list(itertools.islice(prompts(), NUM_PROMPTS))
    assert len(set(texts)) == NUM_PROMPTS
    theirs = own_streams(folder, "float32", ids_of(folder, texts), NUM_TOKENS)
    for backend in ("xla", "mlx"):
        with LLM(backend=backend, dtype="float32", max_num_seqs=8, max_model_len=128) as llm:
            ours = greedy(llm, texts, NUM_TOKENS)
        equal = [
            own.check(stream, f"{backend}: {text}")
            for own, stream, text in zip(theirs, ours, texts, strict=True)
        ]
        print(
            f"{backend}: {sum(equal)} of {len(equal)} streams equal, the others part at near ties"
        )


@pytest.mark.parametrize("bits", [None, 4], ids=["bfloat16", "4 bits"])
def test_smollm2_as_an_mlx_checkpoint_answers_like_mlx_lm(
    smollm2_folder: Path, tmp_path: Path, bits: int | None
):
    folder = tmp_path / "mlx"
    command = ["-m", "mlx_lm", "convert", "--hf-path", str(smollm2_folder)]
    command += ["--mlx-path", str(folder), "--dtype", "bfloat16"]
    command += [] if bits is None else ["-q", "--q-bits", str(bits)]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    texts = list(REAL_PROMPTS)
    with LLM(str(folder), backend="mlx", max_num_seqs=4, max_model_len=128) as llm:
        ours = greedy(llm, texts, NUM_REAL_TOKENS)
    theirs = own_streams(folder, None, ids_of(smollm2_folder, texts), NUM_REAL_TOKENS)
    assert ours == [own.token_ids for own in theirs]
