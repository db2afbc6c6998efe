"""`cadenza serve` with several models, in processes: the right model answers, memory comes back."""

from pathlib import Path

import pytest

from tests.server.serve_process import ServeProcess, is_alive, serve_process

FIXTURES = Path(__file__).parents[1] / "fixtures"
FIRST, SECOND = "llama-tied-linear", "qwen3-tied"
SIZES = ("--max-num-seqs", "2", "--max-model-len", "64", "--max-num-batched-tokens", "16")
BODY = {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "return_token_ids": True}

pytestmark = pytest.mark.soak


def tokens_of(serving: ServeProcess, model: str) -> list[int]:
    answer = serving.post("/v1/completions", {**BODY, "model": model})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["token_ids"]


def engine_pids(serving: ServeProcess) -> set[int]:
    children = Path(f"/proc/{serving.process.pid}/task").glob("*/children")
    found = {int(pid) for each in children for pid in each.read_text().split()}
    return {pid for pid in found if "engine_program" in command_of(pid)}


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """The tokens of each model from a server of its own."""
    found: dict[str, list[int]] = {}
    for name in (FIRST, SECOND):
        with serve_process(FIXTURES / name, *SIZES) as serving:
            serving.wait_ready()
            found[name] = tokens_of(serving, name)
    assert found[FIRST] != found[SECOND]
    return found


def test_models_take_turns_and_each_answers_with_its_own_tokens(
    alone: dict[str, list[int]],
) -> None:
    with serve_process(FIXTURES / FIRST, FIXTURES / SECOND, *SIZES) as serving:
        serving.wait_ready()
        (first_pid,) = engine_pids(serving)
        assert tokens_of(serving, FIRST) == alone[FIRST]
        assert tokens_of(serving, SECOND) == alone[SECOND]
        assert not is_alive(first_pid)
        assert tokens_of(serving, FIRST) == alone[FIRST]
        assert len(engine_pids(serving)) == 1
        serving.terminate()
        assert serving.wait() == 0


def test_two_models_are_loaded_side_by_side(alone: dict[str, list[int]]) -> None:
    flags = (*SIZES, "--max-loaded-models", "2")
    with serve_process(FIXTURES / FIRST, FIXTURES / SECOND, *flags) as serving:
        serving.wait_ready()
        assert tokens_of(serving, SECOND) == alone[SECOND]
        assert tokens_of(serving, FIRST) == alone[FIRST]
        assert len(engine_pids(serving)) == 2
        serving.terminate()
        assert serving.wait() == 0


def test_an_idle_model_gives_its_memory_back_and_is_loaded_again(
    alone: dict[str, list[int]],
) -> None:
    with serve_process(FIXTURES / FIRST, *SIZES, "--idle-unload", "2") as serving:
        serving.wait_ready()
        (pid,) = engine_pids(serving)
        serving.wait_for(lambda: not is_alive(pid))
        assert engine_pids(serving) == set()
        assert serving.status("/ready") == 200
        assert tokens_of(serving, FIRST) == alone[FIRST]
        (again,) = engine_pids(serving)
        assert again != pid
