"""The trained models of `make real`, as users run them; skipped where they are absent.

What transformers makes of them is compared by `make oracle`. Here: known answers, the perplexity of
a fixed text, and streams that a batch does not change. Invariant: the figures are of the converted
files as they are pinned, so a change of either shows.
"""

import json
import math
import struct
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from cadenza import LLM, SamplingParams
from cadenza.checkpoint.opening import open_checkpoint
from cadenza.outputs import RequestOutput
from cadenza.text import ChatTemplate
from tools.real_models import GEMMA3, SMOLLM2

TEXT = Path("LICENSE")
NUM_CHARS = 3900
PERPLEXITY = {SMOLLM2.name: 15.078, GEMMA3.name: 9.553}
"""Of the text in bfloat16. `make oracle` compares float32 with transformers, on another text."""

PROMPT_LENGTHS = (3, 700, 40, 530, 1, 700)
"""In tokens; two are the same, and three are longer than Gemma's window of 512."""

NUM_TOKENS = 10
QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]

GGUF_PROMPT = "The capital of Japan is"

pytestmark = [pytest.mark.native, pytest.mark.slow]


@pytest.fixture(scope="module")
def llm(real_folder: Path) -> Generator[LLM]:
    with LLM(real_folder, max_num_seqs=6, max_model_len=1024, enable_prefix_caching=False) as llm:
        yield llm


def test_a_known_answer_is_given(llm: LLM, real_folder: Path):
    """Through the chat template of the model that has one."""
    params = SamplingParams(temperature=0.0, max_tokens=8)
    if real_folder.name == SMOLLM2.name:
        output = llm.chat(QUESTION, params)[0].outputs[0]
        assert output.text == "The capital of Japan is Tokyo."
        assert output.finish_reason == "stop"
    else:
        output = llm.generate("The capital of France is Paris. The capital of Japan is", params)[0]
        assert output.outputs[0].text.startswith(" Tokyo.")


def test_the_chat_template_is_the_models_own(smollm2_folder: Path):
    files = open_checkpoint(smollm2_folder).tokenizer
    template = ChatTemplate.of(files.chat_templates, files.special_tokens)
    assert template is not None
    assert template.render(QUESTION, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_text_has_the_known_perplexity(llm: LLM, real_folder: Path):
    perplexity = math.exp(-own_logprobs(llm).mean())
    assert perplexity == pytest.approx(PERPLEXITY[real_folder.name], rel=0.01)


def own_logprobs(llm: LLM) -> np.ndarray:
    """The log probability of each token of the text but the first, [T - 1]."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    output = llm.generate(TEXT.read_text(encoding="utf-8")[:NUM_CHARS], params)[0]
    assert output.prompt_logprobs is not None
    told = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return np.array([record[token_id].logprob for token_id, record in told if record is not None])


@pytest.mark.parametrize("real_folder", [GEMMA3], ids=[GEMMA3.name], indirect=True)
def test_a_wider_window_changes_what_lies_beyond_it_alone(
    llm: LLM, real_folder: Path, tmp_path: Path
):
    config = json.loads((real_folder / "config.json").read_text())
    window = config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": window + 8}))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).symlink_to(real_folder / name)
    expected = own_logprobs(llm)
    with LLM(tmp_path, max_num_seqs=6, max_model_len=1024) as other:
        wider = own_logprobs(other)
    assert len(expected) > window + 200
    assert np.array_equal(wider[: window - 1], expected[: window - 1])
    assert np.abs(wider - expected).max() > 0.01


def test_streams_of_a_batch_are_bitwise_those_of_each_request_alone(llm: LLM):
    """Half of them sampled; prompts are cut into chunks and cross the window in mid-batch."""
    text = TEXT.read_text(encoding="utf-8")[:NUM_CHARS]
    text_ids = llm.generate(text, SamplingParams(max_tokens=1))[0].prompt_token_ids
    prompts = [list(text_ids[7 * index :][:length]) for index, length in enumerate(PROMPT_LENGTHS)]
    assert [len(prompt) for prompt in prompts] == list(PROMPT_LENGTHS)
    params = [
        SamplingParams(
            temperature=float(index % 2),
            seed=index,
            max_tokens=NUM_TOKENS,
            logprobs=5,
            ignore_eos=True,
        )
        for index, _ in enumerate(prompts)
    ]
    together = llm.generate(prompts, params)
    alone = [
        llm.generate([prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)
    ]
    assert [bits_of(output) for output in together] == [bits_of(output) for output in alone]
    assert len({bits_of(output) for output in together}) == len(prompts)


def bits_of(output: RequestOutput) -> bytes:
    """Each token and its log probabilities, to the last bit."""
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.token_ids) == NUM_TOKENS
    return b"".join(
        struct.pack("<qd", token_id, each.logprob)
        for record in answer.logprobs
        for token_id, each in sorted(record.items())
    )


def test_the_gguf_file_scores_a_text_like_the_folder_made_of_it(llm: LLM, real_folder: Path):
    """The folder has the blocks' values as gguf-py decodes them; with the file itself activations
    are rounded to int8 in products.
    """
    file = real_folder.with_name(f"{real_folder.name}.gguf")
    with LLM(file, max_num_seqs=6, max_model_len=1024, enable_prefix_caching=False) as ours:
        found = own_logprobs(ours)
        answer = ours.generate(GGUF_PROMPT, SamplingParams(temperature=0.0, max_tokens=1))
    assert answer[0].outputs[0].text == " Tokyo"
    difference = found - own_logprobs(llm)
    assert abs(difference.mean()) < 0.01
    assert np.abs(difference).mean() < 0.1  # SmolLM2: 0.069
