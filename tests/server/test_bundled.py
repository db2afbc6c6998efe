"""The bundled model behind the server: overlap, many streams, a long prompt."""

import threading
from typing import Any

import httpx
import pytest

from cadenza import LLM, SamplingParams
from tests.server.harness import InBackground, RunningServer, in_background
from tests.server.watched_service import WatchedService

PROMPTS = ["The capital of France is", "12 + 30 =", "Once upon a time", "The dog"]


def test_four_completions_overlap_and_are_what_each_is_alone(
    bundled: RunningServer, watched: WatchedService
) -> None:
    bodies = [
        {
            "prompt": prompt,
            "max_tokens": 100,
            "ignore_eos": True,
            "seed": 5,
            "return_token_ids": True,
        }
        for prompt in PROMPTS
    ]

    def ask(body: dict[str, Any]) -> Any:
        return bundled.post("/v1/completions", body).json()["choices"][0]["token_ids"]

    watched.gather(1)
    alone = [ask(body) for body in bodies]
    assert len({tuple(answer) for answer in alone}) == 4
    assert watched.most_running == 1
    watched.gather(4)
    together = in_background(lambda body=body: ask(body) for body in bodies)
    assert [each.result() for each in together] == alone
    assert watched.most_running == 4


@pytest.mark.soak
def test_evaluation_harnesses_get_the_log_probabilities_of_their_prompts(
    bundled: RunningServer,
) -> None:
    """Their request: several prompts of token ids, echoed with log probabilities, one new token."""
    prompts = [[7 + index * 3 for index in range(length)] for length in (2, 30, 150)]
    body = {"prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": 1, "temperature": 0}
    choices = bundled.post("/v1/completions", body).json()["choices"]
    params = SamplingParams(prompt_logprobs=2, max_tokens=1, temperature=0)
    with LLM(max_num_seqs=4, max_model_len=256, max_num_batched_tokens=64) as llm:
        outputs = llm.generate(prompts, params)
    for choice, output, prompt in zip(choices, outputs, prompts, strict=True):
        told = choice["logprobs"]["token_logprobs"]
        assert output.prompt_logprobs is not None
        expected = [
            None if entry is None else entry[token_id].logprob
            for token_id, entry in zip(prompt, output.prompt_logprobs, strict=True)
        ]
        assert told[: len(prompt)] == pytest.approx(expected, abs=1e-6)
        assert len(told) == len(prompt) + len(output.outputs[0].token_ids)


def test_more_samples_than_rows_are_all_answered(bundled: RunningServer) -> None:
    body = {"prompt": "The dog", "n": 16, "max_tokens": 4, "ignore_eos": True}
    answer = bundled.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(16))


def test_a_request_that_forbids_every_token_is_its_clients_fault(bundled: RunningServer) -> None:
    body = {"prompt": "x", "allowed_token_ids": [5]}
    body |= {"stop_token_ids": [5], "min_tokens": 2, "max_tokens": 4}
    answer = bundled.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "allowed_token_ids"


@pytest.mark.soak
def test_sixty_four_streams_at_once_are_all_served(bundled: RunningServer) -> None:
    body = {"prompt": "Once", "max_tokens": 16, "ignore_eos": True, "temperature": 0}
    expected = bundled.post("/v1/completions", body).json()["choices"][0]["text"]

    def ask() -> str:
        events = bundled.events("/v1/completions", {**body, "stream": True})[:-1]
        return "".join(choice["text"] for event in events for choice in event["choices"])

    assert [each.result() for each in in_background([ask] * 64)] == [expected] * 64


def test_probes_answer_throughout_long_prefills(bundled: RunningServer) -> None:
    """Counted, not timed, so that a busy machine changes nothing: both sides are slower on it.

    One that waits for the prefill answers the first probe with it, and few more before its answer
    has been read.
    """
    prompts = [[first] * 2000 for first in range(7, 11)]
    body = {"prompt": prompts, "max_tokens": 1, "cache_salt": "prefill"}
    num_answered, is_over = 0, threading.Event()

    def ask() -> httpx.Response:
        try:
            return bundled.post("/v1/completions", body)
        finally:
            is_over.set()

    with bundled.client() as client:
        asking = InBackground(ask)
        while not is_over.is_set():
            assert client.get("/live").status_code == 200
            num_answered += 1
    assert asking.result().status_code == 200
    assert num_answered > 5
