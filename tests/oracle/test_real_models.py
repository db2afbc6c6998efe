"""The trained models of `make real` in transformers: logits, perplexity and greedy answers.

Both sides read the same folder in float32, so they have the same weights to the last bit. A greedy
answer is checked token by token under our own prefix: where every token of it is transformers'
likeliest one, it is transformers' greedy answer too. Two tokens whose logits differ by less than
`TOLERANCE` (of the range of the logits) are a near tie, in which rounding decides; such answers are
printed and must be rare.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cadenza import LLM, SamplingParams
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.outputs import RequestOutput
from cadenza.text import Tokenizer
from tests.oracle.hf import load_model
from tests.oracle.tapped_engine import TappedEngine, log_softmax

TOLERANCE = 1e-4
"""Of the range of transformers' logits, as for the fixtures."""

LOGPROB_TOLERANCE = 1e-3
"""Of a log probability in float32; 7e-5 was measured."""

BFLOAT16_PERPLEXITY_TOLERANCE = 5e-3
BFLOAT16_RMS_TOLERANCE = 0.1
HEAD_TOLERANCE = 1e-5
"""Of the range too, for a top log probability against the one that follows from the hidden state:
trained logits are ten times those of the fixtures.
"""

TEXT = Path(__file__).with_name("corpus.txt")
"""About 1,600 tokens: beyond three windows of Gemma."""

SEQUENCES = ((0, 200, 150), (300, 130, 100), (700, 64, 1))
"""Start in the text's ids, tokens, and how many of them are prompt; the others are decodes."""

TOPICS = (
    "the sea, a lighthouse, gravity, the number seven, bread, the French Revolution, honey bees, "
    "a lost key, prime numbers, the moon, old libraries, volcanoes, chess, rain in the city, "
    "photosynthesis, a train journey, the colour blue, antibiotics, a cat named Tom, economics"
).split(", ")
REQUESTS = (
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "List three facts about {}.",
    "What is the history of {}?",
    "Translate into French: I like {}.",
    "Tell me a story in which {} matters.",
    "Is {} dangerous? Answer yes or no, and say why.",
    "Write a Python function that has to do with {}.",
    "Give me a title for an essay about {}.",
    "Which question about {} is hardest to answer?",
)
NUM_PROMPTS = 200
NUM_TOKENS = 32
MAX_NEAR_TIES = 2

pytestmark = [pytest.mark.oracle, pytest.mark.native]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of each token of a text but the first: its log probability [T - 1], and the likeliest one's
    [T - 1].
    """

    own: np.ndarray
    best: np.ndarray

    @property
    def perplexity(self) -> float:
        return float(np.exp(-self.own.mean()))


@pytest.fixture(scope="module")
def theirs(real_folder: Path) -> Any:
    return load_model(real_folder)


@pytest.fixture(scope="module")
def tokenizer(real_folder: Path) -> Tokenizer:
    return Tokenizer(real_folder / "tokenizer.json")


@pytest.fixture(scope="module")
def text_ids(tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    assert len(ids) > 1200
    return ids


def logits_of(model: Any, token_ids: list[int], *, last: int = 0) -> np.ndarray:
    """transformers' logits [T, V]; of the `last` tokens only, where that is not 0."""
    import torch

    with torch.inference_mode():
        output = model(torch.tensor([token_ids]), use_cache=False, logits_to_keep=last)
    return output.logits[0].float().numpy()


def test_logits_are_those_of_transformers(
    theirs: Any, real_folder: Path, text_ids: list[int], capsys: pytest.CaptureFixture[str]
):
    sequences = [text_ids[start : start + length] for start, length, _ in SEQUENCES]
    engine = TappedEngine(real_folder, ops="native", dtype="float32")
    forced = engine.force(sequences, [num_prompt for _, _, num_prompt in SEQUENCES])
    errors: list[float] = []
    head_errors: list[float] = []
    for ours, token_ids in zip(forced, sequences, strict=True):
        expected = logits_of(theirs, token_ids)
        assert ours.logits.shape == expected.shape
        errors.append(float(np.abs(ours.logits - expected).max() / np.ptp(expected)))
        head_errors.append(float(ours.head_error / np.ptp(expected)))
    with capsys.disabled():
        print(
            f"\n{real_folder.name}: logits off by {max(errors):.2e} of their range, the head by "
            f"{max(head_errors):.2e}",
            end="",
        )
    assert max(errors) <= TOLERANCE
    assert max(head_errors) <= HEAD_TOLERANCE


@pytest.fixture(scope="module")
def their_scores(theirs: Any, text_ids: list[int]) -> Scores:
    logits = logits_of(theirs, text_ids)[:-1]
    rows = np.array_split(logits, len(logits) // 64)
    following = np.array_split(np.array(text_ids[1:]), len(logits) // 64)
    own: list[np.ndarray] = []
    best: list[np.ndarray] = []
    for part, ids in zip(rows, following, strict=True):
        logprobs = log_softmax(part)
        own.append(np.take_along_axis(logprobs, ids[:, None], axis=1)[:, 0])
        best.append(logprobs.max(axis=1))
    return Scores(own=np.concatenate(own), best=np.concatenate(best))


def our_scores(folder: Path, text_ids: list[int], dtype: str) -> Scores:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    with LLM(folder, dtype=dtype, max_num_seqs=2, max_model_len=2048) as llm:
        told = llm.generate([text_ids], params)[0].prompt_logprobs
    assert told is not None
    assert told[0] is None
    records = [record for record in told[1:] if record is not None]
    own = [record[token_id].logprob for record, token_id in zip(records, text_ids[1:], strict=True)]
    best = [max(each.logprob for each in record.values()) for record in records]
    return Scores(own=np.array(own), best=np.array(best))


def test_a_long_text_has_transformers_log_probabilities(
    real_folder: Path,
    text_ids: list[int],
    their_scores: Scores,
    capsys: pytest.CaptureFixture[str],
):
    """Far beyond a sliding window; bfloat16 differs by what rounding costs, and does differ."""
    ours = our_scores(real_folder, text_ids, "float32")
    rounded = our_scores(real_folder, text_ids, "bfloat16")
    error = max(
        float(np.abs(ours.own - their_scores.own).max()),
        float(np.abs(ours.best - their_scores.best).max()),
    )
    rounding = float(np.sqrt(np.square(rounded.own - their_scores.own).mean()))
    with capsys.disabled():
        print(
            f"\n{real_folder.name}: perplexity of {len(text_ids)} tokens {ours.perplexity:.4f} "
            f"(transformers {their_scores.perplexity:.4f}, ours in bfloat16 "
            f"{rounded.perplexity:.4f}); log probabilities off by {error:.1e} at most, in bfloat16 "
            f"by {rounding:.1e} rms",
            end="",
        )
    assert error <= LOGPROB_TOLERANCE
    assert ours.perplexity == pytest.approx(their_scores.perplexity, rel=1e-5)
    assert rounded.perplexity == pytest.approx(
        their_scores.perplexity, rel=BFLOAT16_PERPLEXITY_TOLERANCE
    )
    assert 1e-3 < rounding < BFLOAT16_RMS_TOLERANCE
    assert their_scores.perplexity < 100, "the weights are not those of a trained model"


def test_another_rope_or_window_is_noticed(
    real_folder: Path, text_ids: list[int], their_scores: Scores, tmp_path: Path
):
    """The negative control: each setting, slightly changed, is beyond the tolerance."""
    config = json.loads((real_folder / "config.json").read_text())
    ropes = config["rope_parameters"]
    changes: list[dict[str, Any]] = []
    if "sliding_window" in config:
        changes.append({"sliding_window": config["sliding_window"] + 8})
        ropes = ropes["sliding_attention"]
    ropes["rope_theta"] *= 1.01
    changes.append({"rope_parameters": config["rope_parameters"]})
    original = json.loads((real_folder / "config.json").read_text())
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(original | change))
        for name in ("model.safetensors", "tokenizer.json"):
            (folder / name).symlink_to(real_folder / name)
        wrong = our_scores(folder, text_ids, "float32")
        assert np.abs(wrong.own - their_scores.own).max() > 10 * LOGPROB_TOLERANCE, change


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    """Asked as user messages where the model has a chat template, else continued as text."""
    texts = [form.format(topic) for topic, form in itertools.product(TOPICS, REQUESTS)]
    assert len(set(texts)) == NUM_PROMPTS
    return texts


def our_answers(folder: Path, prompts: list[str]) -> list[RequestOutput]:
    """All prompts in one running batch."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    with LLM(folder, dtype="float32", max_num_seqs=16, max_model_len=512) as llm:
        if open_checkpoint(folder).chat_template is None:
            return llm.generate(prompts, params)
        return llm.chat([[{"role": "user", "content": text}] for text in prompts], params)


def test_greedy_answers_are_those_of_transformers(
    real_folder: Path,
    theirs: Any,
    prompts: list[str],
    capsys: pytest.CaptureFixture[str],
):
    eos = set(open_checkpoint(real_folder).eos_token_ids)
    outputs = our_answers(real_folder, prompts)
    ties: dict[int, float] = {}
    for index, output in enumerate(outputs):
        gap = worst_gap(theirs, output, eos)
        if gap > 0.0:
            ties[index] = gap
    answers = {output.outputs[0].text for output in outputs}
    with capsys.disabled():
        num_same = len(prompts) - len(ties)
        print(
            f"\n{real_folder.name}: {num_same} of {len(prompts)} answers are transformers'; near "
            f"ties, of the range: {ties}",
            end="",
        )
    assert len(outputs) == NUM_PROMPTS
    assert len(answers) > NUM_PROMPTS * 3 // 4, "the answers are all alike"
    assert all(gap <= TOLERANCE for gap in ties.values())
    assert len(ties) <= MAX_NEAR_TIES


def worst_gap(model: Any, output: RequestOutput, eos: set[int]) -> float:
    """The largest distance of one of our tokens to transformers' likeliest token in its place, as a
    share of the range of the logits; 0 where all are the likeliest. The end of an answer counts.
    """
    answer = output.outputs[0]
    prompt, new_ids = list(output.prompt_token_ids), list(answer.token_ids)
    logits = logits_of(model, prompt + new_ids, last=len(new_ids) + 1)  # [N + 1, V]
    gaps = [row.max() - row[token_id] for row, token_id in zip(logits, new_ids, strict=False)]
    if answer.finish_reason == "stop" and not eos & set(new_ids):
        gaps.append(logits[-1].max() - max(logits[-1][token_id] for token_id in eos))
    return float(max(gaps) / np.ptp(logits))
