"""`cadenza chat` with stdin piped: each line answered, the history kept."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cadenza import LLM
from cadenza.loading.engine_plan import EnginePlan
from tests.cli.harness import Cadenza, Ran

LIMITS = ("-np", 2, "-c", 256, "--num-pages", 16, "--max-num-batched-tokens", 64)
FLAGS = (*LIMITS, "--seed", 2, "--max-tokens", 12, "--ignore-eos")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    limits = {"max_num_seqs": 2, "max_model_len": 256, "max_num_batched_tokens": 64}
    with LLM(model, num_pages=16, **limits) as llm:
        yield llm


def answers(llm: LLM, *turns: str, system: str | None = None) -> list[str]:
    """What `LLM.chat` answers to each of a conversation's turns."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    found: list[str] = []
    params = llm.default_params(seed=2, max_tokens=12, ignore_eos=True)
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = llm.chat(messages, params)[0].outputs[0].text
        messages.append({"role": "assistant", "content": text})
        found.append(text)
    return found


def test_piped_lines_are_answered_with_the_history_and_commands_change_it(
    cadenza: Cadenza, model: Path, llm: LLM
):
    """One conversation with every command; nothing is printed but answers."""
    lines = (
        *("/retry", "the quick", "", "one two", "/retry", "six"),
        *("/reset", "/retry", "the", "/reset", "/system be quick", "the", "/reset", "the"),
        *("/system", "/reset", "the", "/bye", "never"),
    )
    ran = cadenza("chat", model, *FLAGS, stdin="".join(f"{line}\n" for line in lines))
    first, second, third = answers(llm, "the quick", "one two", "six")
    assert second != answers(llm, "one two")[0]
    (plain,), (quick,) = answers(llm, "the"), answers(llm, "the", system="be quick")
    assert plain != quick
    expected = (first, second, second, third, plain, quick, quick, plain)
    assert ran == Ran(0, "".join(f"{text}\n" for text in expected), "")


def test_the_pool_has_one_context(cadenza: Cadenza, model: Path, plans: list[EnginePlan]):
    """The answer goes on to the end of the context."""
    given = ("chat", model, "-np", 4, "-c", 64, "--ignore-eos", "--max-num-batched-tokens", 64)
    ran = cadenza(*given, stdin="the\n")
    assert [each.limits.num_pages for each in plans] == [4]
    assert (ran.code, ran.err) == (0, "(the answer was cut: it fills the context of 64 tokens)\n")


def test_an_answer_that_max_tokens_cut_is_not_said_to_fill_the_context(
    cadenza: Cadenza, model: Path
):
    assert cadenza("chat", model, *FLAGS, stdin="the\n").err == ""


def test_a_system_message_comes_first(cadenza: Cadenza, model: Path, llm: LLM):
    ran = cadenza("chat", model, *FLAGS, "--system", "be quick", stdin="the\n")
    assert ran.out == answers(llm, "the", system="be quick")[0] + "\n"


def test_verbose_tells_prefix_cache_reuse_on_stderr(cadenza: Cadenza, model: Path):
    turns = "one two three four five six seven the quick brown fox jumps over the lazy dog\n" * 2
    ran = cadenza("chat", model, *FLAGS, "--verbose", stdin=turns)
    first, second = ran.err.splitlines()
    assert ", 0 of them from the prefix cache" in first
    assert ", 0 of them from the prefix cache" not in second
    uncached = cadenza(
        "chat", model, *FLAGS, "--verbose", "--no-enable-prefix-caching", stdin=turns
    )
    assert uncached.out == ran.out
    assert uncached.err.count(", 0 of them from the prefix cache") == 2


SMALL = ("-np", 1, "-c", 64, "--num-pages", 16, "--max-num-batched-tokens", 64)


@pytest.mark.parametrize("policy", [(), ("--context-policy", "refuse")])
def test_a_conversation_that_outgrows_the_context_exits_with_2(
    cadenza: Cadenza, model: Path, policy: tuple[str, ...]
):
    flags = (*SMALL, "--ignore-eos", "--max-tokens", 12, *policy)
    ran = cadenza("chat", model, *flags, stdin="the quick\n" * 9)
    assert (ran.code, "maximum context length is 64" in ran.err) == (2, True)


@pytest.mark.parametrize("stdin", ["", "/exit\n", "/quit\n"])
def test_nothing_asked_is_nothing_answered(cadenza: Cadenza, model: Path, stdin: str):
    assert cadenza("chat", model, *FLAGS, stdin=stdin) == Ran(0, "", "")


def test_a_model_without_chat_template_is_refused(cadenza: Cadenza, bare_model: Path):
    ran = cadenza("chat", bare_model, *FLAGS, stdin="the\n")
    assert ran.code == 2
    assert "chat template" in ran.err


def test_a_mistyped_command_ends_a_piped_conversation_and_does_not_reach_the_model(
    cadenza: Cadenza, model: Path
):
    ran = cadenza("chat", model, *FLAGS, stdin="/systen be quick\nthe\n")
    assert (ran.code, ran.out) == (2, "")
    assert "no command /systen (did you mean /system?)" in ran.err


def test_set_changes_the_sampling_from_then_on_and_without_a_value_no_more(
    cadenza: Cadenza, model: Path, llm: LLM
):
    turns = "/set parameter num_predict 3\nthe\n/reset\n/set max-tokens 12\n/set seed 5\nthe\n"
    turns += "/reset\n/set seed\n/set stop a\n/set seed 2\nthe\n"
    ran = cadenza("chat", model, *FLAGS, stdin=turns)
    question = [{"role": "user", "content": "the"}]
    expected = [
        llm.chat(question, llm.default_params(ignore_eos=True, **each))[0].outputs[0].text
        for each in (
            {"seed": 2, "max_tokens": 3},
            {"seed": 5, "max_tokens": 12},
            {"seed": 2, "max_tokens": 12, "stop": ["a"]},
        )
    ]
    assert ran == Ran(0, "".join(f"{text}\n" for text in expected), "")


def test_the_oldest_turns_leave_a_full_context_where_the_policy_says_so(
    cadenza: Cadenza, model: Path
):
    lines = "".join(f"{word}\n" for word in ("the quick", "brown fox", "one two", "six"))
    flags = (*SMALL, "--seed", 2, "--max-tokens", 12, "--ignore-eos")
    ran = cadenza("chat", model, *flags, "--context-policy", "drop-oldest", stdin=lines)
    assert ran.code == 0
    assert "(the context was full: dropped the 1 oldest question with the answers)" in ran.err


def test_run_answers_its_words_as_one_message_and_puts_what_is_piped_behind_them(
    cadenza: Cadenza, model: Path, llm: LLM
):
    (words,), (both,), (piped,) = (
        answers(llm, text) for text in ("the quick", "the quick\n\none\ntwo", "one\ntwo")
    )
    assert cadenza("run", model, "the", "quick", *FLAGS) == Ran(0, f"{words}\n", "")
    assert cadenza("run", "--model", model, "the quick", *FLAGS) == Ran(0, f"{words}\n", "")
    ran = cadenza("run", model, "the quick", *FLAGS, stdin="one\ntwo\n")
    assert ran == Ran(0, f"{both}\n", "")
    assert cadenza("run", model, *FLAGS, stdin="one\ntwo\n") == Ran(0, f"{piped}\n", "")
    (told,) = answers(llm, "the", system="be quick")
    assert cadenza("run", model, "the", "--system", "be quick", *FLAGS).out == f"{told}\n"


def test_run_of_a_model_without_chat_template_is_refused(cadenza: Cadenza, bare_model: Path):
    ran = cadenza("run", bare_model, "the", *FLAGS)
    assert (ran.code, "chat template" in ran.err) == (2, True)
