"""`cadenza generate`: what it prints is what `LLM.generate` gives."""

import io
import re
import subprocess
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from cadenza import LLM
from cadenza.loading.engine_plan import EnginePlan
from tests.cli.harness import COMMAND, ENGINE, Cadenza, Ran

PROMPTS = ("the quick brown", "one two", "three four five six seven the lazy dog")
OPTIONS = {"max_num_seqs": 4, "max_model_len": 256, "num_pages": 64, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def llm(model: Path):
    with LLM(model, **OPTIONS) as llm:
        yield llm


def test_json_has_the_token_ids_that_llm_gives(cadenza: Cadenza, model: Path, llm: LLM):
    ran = cadenza("generate", model, *PROMPTS, "--max-tokens", 12, "--json", "--seed", 9, *ENGINE)
    expected = llm.generate(list(PROMPTS), llm.default_params(max_tokens=12, seed=9))
    assert (ran.code, ran.err) == (0, "")
    *found, summary = ran.objects
    assert [each["index"] for each in found] == [0, 1, 2]
    for each, output, prompt in zip(found, expected, PROMPTS, strict=True):
        assert each["object"] == "request"
        assert each["prompt"] == prompt
        assert tuple(each["prompt_token_ids"]) == output.prompt_token_ids
        assert tuple(each["token_ids"]) == output.outputs[0].token_ids
        assert each["text"] == output.outputs[0].text
        assert each["finish_reason"] == output.outputs[0].finish_reason
        assert each["num_cached_tokens"] == 0
        assert "logprobs" not in each
    assert summary["object"] == "summary"
    assert summary["num_generated_tokens"] == sum(len(each["token_ids"]) for each in found)
    assert summary["num_steps"] > 0
    assert summary["tokens_per_s"] > 0


FIVE = ("--max-tokens", 200, "--n", 5, "--ignore-eos", "--json", "--seed", 3)


def test_the_pool_is_planned_for_the_prompts(
    cadenza: Cadenza, model: Path, plans: list[EnginePlan]
):
    """A sample needs 13 pages."""
    ran = cadenza("generate", model, "the", *FIVE, "--max-num-batched-tokens", 64)
    assert [each.limits.num_pages for each in plans] == [128]
    assert len(ran.objects) == 6


@pytest.mark.soak
def test_the_size_of_the_pool_changes_no_answer(
    cadenza: Cadenza, model: Path, plans: list[EnginePlan]
):
    """16 rows of the whole context have the 8,192 of the flag."""
    few = ("--max-num-batched-tokens", 64)
    runs = [
        [each["token_ids"] for each in cadenza("generate", model, "the", *given).objects[:-1]]
        for given in ((*FIVE, *few), (*FIVE, *few, "--num-pages", 8192))
    ]
    assert [each.limits.num_pages for each in plans] == [128, 8192]
    assert runs[0] == runs[1]


def test_without_a_seed_each_request_has_the_one_that_llm_derives(cadenza: Cadenza, model: Path):
    prompts = [PROMPTS[0]] * 3
    ran = cadenza("generate", model, *prompts, "--max-tokens", 8, "--json", *ENGINE)
    found = [tuple(each["token_ids"]) for each in ran.objects[:-1]]
    with LLM(model, **OPTIONS) as fresh:
        expected = fresh.generate(prompts, fresh.default_params(max_tokens=8))
    assert found == [output.outputs[0].token_ids for output in expected]
    assert len(set(found)) > 1


def test_logprobs_are_printed_on_demand(cadenza: Cadenza, model: Path):
    flags = ("--max-tokens", 3, "--ignore-eos", "--json", "--logprobs", 2, *ENGINE)
    first = cadenza("generate", model, "the", *flags).objects[0]
    assert [each["token_id"] for each in first["logprobs"]] == first["token_ids"]
    for each in first["logprobs"]:
        assert each["logprob"] <= 0
        assert 2 <= len(each["top"]) <= 3
        likeliest = [top["logprob"] for top in each["top"]]
        assert likeliest == sorted(likeliest, reverse=True)


def test_one_prompt_prints_its_text_and_nothing_else(cadenza: Cadenza, model: Path, llm: LLM):
    flags = ("--max-tokens", 10, "--temperature", 0, "--ignore-eos")
    ran = cadenza("generate", model, PROMPTS[0], *flags, *ENGINE)
    params = llm.default_params(max_tokens=10, temperature=0, ignore_eos=True)
    text = llm.generate(PROMPTS[0], params)[0].outputs[0].text
    assert ran == Ran(0, text.rstrip("\n") + "\n", "")


def test_several_prompts_are_printed_as_blocks_with_their_numbers(cadenza: Cadenza, model: Path):
    ran = cadenza("generate", "--model", model, *PROMPTS, "--max-tokens", 4, *ENGINE)
    assert (ran.code, ran.err) == (0, "")
    for number, prompt in enumerate(PROMPTS, start=1):
        assert f"[{number}] {prompt}\n" in ran.out


def test_prompts_come_from_a_file_and_from_stdin(cadenza: Cadenza, model: Path, tmp_path: Path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "the quick"}\n{"prompt": [5, 6, 7]}\n')
    flags = ("--max-tokens", 2, "--json", *ENGINE)
    found = cadenza("generate", model, "first", "--prompts-file", path, *flags).objects
    assert [each["prompt"] for each in found[:-1]] == ["first", "the quick", None]
    assert found[2]["prompt_token_ids"] == [5, 6, 7]
    ran = cadenza("generate", model, "--prompts-file", "-", *flags, stdin="one\n\ntwo\n")
    assert [each["prompt"] for each in ran.objects[:-1]] == ["one", "two"]
    ran = cadenza(
        "generate", model, "--prompts-file", "-", "--prompts-format", "jsonl", *flags, stdin="[9]\n"
    )
    assert ran.objects[0]["prompt_token_ids"] == [9]


def test_what_is_piped_in_is_one_prompt_where_no_other_is_given(cadenza: Cadenza, model: Path):
    flags = ("--max-tokens", 2, "--json", *ENGINE)
    ran = cadenza("generate", model, *flags, stdin="the quick\n\nbrown fox\n")
    assert [each["prompt"] for each in ran.objects[:-1]] == ["the quick\n\nbrown fox"]
    ran = cadenza("generate", model, "one", *flags, stdin="not read\n")
    assert [each["prompt"] for each in ran.objects[:-1]] == ["one"]
    ran = cadenza("generate", model, *flags, stdin=" \n")
    assert (ran.code, ran.out) == (2, "")
    assert "there is no prompt" in ran.err


def test_piped_text_that_is_not_utf_8_is_refused(model: Path):
    ran = subprocess.run(
        [*COMMAND, "generate", str(model)],
        input=b"\xff\xfe",
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert b"is not UTF-8" in ran.stderr


def test_chat_renders_each_prompt_as_a_message(cadenza: Cadenza, model: Path, llm: LLM):
    ran = cadenza("generate", model, "hello", "--chat", "--json", "--seed", 1, *ENGINE)
    message = {"role": "user", "content": "hello"}
    (expected,) = llm.chat([message], llm.default_params(max_tokens=64, seed=1))
    assert ran.objects[0]["prompt"] == "<|user|>hello<|end|><|assistant|>"
    assert tuple(ran.objects[0]["token_ids"]) == expected.outputs[0].token_ids


def test_texts_for_a_model_without_tokenizer_exit_with_2_and_ids_are_served(
    cadenza: Cadenza, bare_model: Path
):
    assert cadenza("generate", bare_model, "the", *ENGINE).code == 2
    flags = ("--prompts-file", "-", "--prompts-format", "jsonl", "--max-tokens", 2, "--json")
    ran = cadenza("generate", bare_model, *flags, *ENGINE, stdin="[3, 4]\n")
    assert ran.code == 0
    assert ran.objects[0]["text"] == ""
    assert ran.objects[0]["token_ids"]


class Screen(io.StringIO):
    """A terminal that keeps what is written."""

    def isatty(self) -> bool:
        return True


def test_many_prompts_of_a_file_show_a_progress_line_where_stderr_is_a_terminal(
    cadenza: Cadenza, model: Path, tmp_path: Path
):
    (tmp_path / "many.txt").write_text("\n".join(PROMPTS * 30))
    flags = ("--max-tokens", 200, "--ignore-eos", "--json", *ENGINE)
    with redirect_stderr(Screen()) as screen:
        ran = cadenza("generate", model, "--prompts-file", tmp_path / "many.txt", *flags)
    assert ran.code == 0
    assert len(ran.objects) == 91
    assert re.search(r"\d+/90 done, 4 rows, [\d.]+ tok/s", screen.getvalue())
