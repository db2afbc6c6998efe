"""The prompts of a load: drawn ones, and those of files, whose faults are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from cadenza.bench.datasets import WORDS
from cadenza.bench.serve_options import LoadOptions
from cadenza.bench.workloads import PlannedRequest
from cadenza.errors import ConfigError


def from_file(path: Path, content: Any, dataset: str, **options: Any) -> list[PlannedRequest]:
    """All prompts of a file, twice."""
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")
    source = LoadOptions(dataset=dataset, dataset_path=str(path), **options).source()  # type: ignore[arg-type]
    return source.take(4, 1)


def said(*turns: str) -> dict[str, Any]:
    who = ("human", "gpt")
    return {
        "conversations": [{"from": who[at % 2], "value": each} for at, each in enumerate(turns)]
    }


def test_random_prompts_can_be_text():
    options = LoadOptions(prompts="text", prompt_lens=(3, 9), output_lens=(2, 5))
    drawn = options.source().take(50, 1)
    lengths = [len(each.text.split()) for each in drawn]
    assert (min(lengths), max(lengths)) == (3, 9)
    assert {word for each in drawn for word in each.text.split()} <= set(WORDS)
    assert len({each.text for each in drawn}) == 50
    assert all(not each.prompt_token_ids for each in drawn)
    assert LoadOptions().source(as_text=True).take(1, 1)[0].text
    assert LoadOptions(prompts="ids").source(as_text=True).take(1, 1)[0].prompt_token_ids


def test_repeated_prefixes_are_shared_by_prompts_of_all_loads():
    options = LoadOptions(
        dataset="prefix-repetition",
        prefix_repetition_num_prefixes=2,
        prefix_repetition_prefix_len=7,
        prompt_lens=(5, 5),
    )
    source = options.source()
    prompts = [each.prompt_token_ids for part in (1, 2) for each in source.take(20, part)]
    assert {len(prompt) for prompt in prompts} == {12}
    assert len({prompt[:7] for prompt in prompts}) == 2
    assert len(set(prompts)) == 40


def test_a_random_conversation_is_a_chat_with_turns():
    options = LoadOptions(dataset="multi-turn", num_turns=3, prompt_lens=(4, 4))
    (drawn,) = options.source().take(1, 1)
    assert [each["role"] for each in drawn.messages] == ["user"]
    texts = [drawn.messages[0]["content"], *drawn.turns]
    assert [len(text.split()) for text in texts] == [4, 4, 4]
    assert len(set(texts)) == 3


def test_a_sharegpt_file_gives_first_turns_and_the_lengths_of_their_answers(tmp_path: Path):
    long, short = "a question of some length", "an answer that has 40 characters exactly"
    content = [
        {"id": "x", **said(long, short, "more", "of it")},
        said("too short", short),
        said(long),
        {"conversations": [{"from": "gpt", "value": short}, {"from": "human", "value": long}]},
    ]
    prompts = from_file(tmp_path / "s.json", content, "sharegpt")
    assert prompts == [PlannedRequest(text=long, max_tokens=10)] * 4
    (first, *_) = from_file(tmp_path / "s.json", content, "sharegpt", output_lens=(7, 7))
    assert first.max_tokens == 7


def test_a_custom_file_has_a_prompt_or_messages_in_each_line(tmp_path: Path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    lines = [{"prompt": "one"}, {"prompt": "two", "output_tokens": 9}, {"messages": messages}]
    text = "\n\n".join(map(json.dumps, lines))
    found = from_file(tmp_path / "c.jsonl", text, "custom")
    # The fourth is the first again.
    assert found[3] == found[0]
    assert {(each.text, each.messages, each.max_tokens) for each in found if each.text} == {
        ("one", (), 256),
        ("two", (), 9),
    }
    (chat,) = [each.messages for each in found[:3] if each.messages]
    assert list(chat) == messages


def test_a_files_conversations_are_played_turn_by_turn(tmp_path: Path):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "x" * 80},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "x" * 40},
        {"role": "user", "content": "three"},
    ]
    (first, *_) = from_file(tmp_path / "m.json", [{"messages": messages}], "multi-turn")
    assert list(first.messages) == messages[:2]
    assert first.turns == ("two", "three")
    assert first.max_tokens == 15


@pytest.mark.parametrize(
    ("dataset", "content", "fault"),
    [
        ("sharegpt", "{", "the file is not JSON"),
        ("sharegpt", {"a": 1}, "the file is {'a': 1}; --dataset sharegpt takes a list"),
        ("sharegpt", [said("a"), {"b": 2}], "entry 2 is {'b': 2}"),
        ("sharegpt", [{"conversations": [{"from": "human"}]}], "entry 1 is"),
        ("sharegpt", [said("short", "short")], "has no prompt that can be sent"),
        ("multi-turn", [["a"]], "entry 1 is"),
        ("custom", '{"prompt": "a"}\n{"prompt', "line 2 is not JSON"),
        ("custom", '{"prompt": 5}', "line 1 is {'prompt': 5}"),
        ("custom", '{"messages": []}', "line 1 is"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', "line 1 is 0"),
        ("custom", "", "has no prompt"),
        ("custom", "[1]", "line 1 is \\[1\\]"),
    ],
)
def test_a_file_of_another_form_is_named_with_the_place(
    dataset: str, content: Any, fault: str, tmp_path: Path
):
    with pytest.raises(ConfigError, match=f"d.json.*{fault}"):
        from_file(tmp_path / "d.json", content, dataset)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    options = LoadOptions(dataset="sharegpt", dataset_path=str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match=r"absent.json cannot be read: No such file"):
        options.source()
    (tmp_path / "b.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"b.json cannot be read: it is not UTF-8"):
        LoadOptions(dataset="sharegpt", dataset_path=str(tmp_path / "b.json")).source()
