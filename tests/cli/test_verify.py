"""`cadenza verify --options` and `replay` on the command line: what differs is told apart."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cadenza.verification.option_matrix import make_matrix
from tests.cli.harness import ENGINE, LIMITS, TINY, Cadenza, write_model


@pytest.mark.soak
def test_the_command_plays_the_matrix(cadenza: Cadenza, model: Path):
    flags = ("--options", "all", "--reference", "solo", "--max-tokens", 4, *LIMITS)
    ran = cadenza("verify", model, *flags)
    assert ran.code == 0, ran.out
    last = ran.out.splitlines()[-1]
    coverage = make_matrix().coverage()
    assert last.startswith(f"REFERENCE-EXACT PASS bitwise requests={coverage.num_combinations} ")
    found = f" options={coverage.num_combinations} pairs={coverage.num_pairs} longest="
    assert found in last


def test_what_did_not_occur_is_no_mismatch(cadenza: Cadenza, model: Path):
    """Answers of four tokens repeat nothing, so that no draft is accepted."""
    drafts = ("--speculative-config", '{"method": "ngram"}', "--max-tokens", 4)
    flags = (*drafts, "--reference", "solo", "--num-requests", 5, *LIMITS)
    ran = cadenza("verify", model, *flags, "--json")
    assert ran.code == 4, ran.out + ran.err
    (found,) = ran.objects
    assert (found["verdict"], found["passed"], found["mismatch"]) == ("NOT SHOWN", False, None)
    assert all(each["num_equal"] == each["num_streams"] for each in found["modes"])
    assert "REFERENCE-EXACT NOT SHOWN accepted_drafts in overlapped loop" in found["last_line"]


def test_the_portable_digest_tells_weights_apart(cadenza: Cadenza, model: Path):
    def digest(*flags: object) -> str:
        given = ("--portable", "--reference", "solo", "--num-requests", 6, "--max-tokens", 4)
        ran = cadenza("verify", *flags, *given, "--json", *LIMITS)
        assert ran.code == 0, ran.out + ran.err
        assert ran.objects[0]["verdict"] == "PASS"
        return ran.objects[0]["digest"]

    assert digest("--shape", "tiny-llama") != digest(model)


SAMPLED = ("--max-tokens", 7, "--temperature", 1.5, "--ignore-eos", *ENGINE)


@pytest.fixture(scope="module")
def receipts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    from cadenza.cli import main

    file = tmp_path_factory.mktemp("receipts") / "r.jsonl"
    given = ("generate", "--model", model, "one two", "the quick", "--receipt", file, *SAMPLED)
    assert main([str(each) for each in given]) == 0
    return [json.loads(line) for line in file.read_text().splitlines()]


def written(tmp_path: Path, *receipts: dict[str, Any]) -> Path:
    file = tmp_path / "changed.jsonl"
    file.write_text("\n".join(map(json.dumps, receipts)))
    return file


def test_receipts_are_equal_one_by_one(
    cadenza: Cadenza, model: Path, receipts: list[dict[str, Any]], tmp_path: Path
):
    assert receipts[0]["params"]["seed"] != receipts[1]["params"]["seed"]
    file = written(tmp_path, *receipts)
    ran = cadenza("replay", file, "--model", model)
    assert (ran.code, ran.out) == (0, f"{file}:1: equal, 7 tokens\n{file}:2: equal, 7 tokens\n")
    assert "one two" not in file.read_text()


def changed(receipt: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """A copy with a change."""
    copy = json.loads(json.dumps(receipt))
    change(copy)
    return copy


def change_token(receipt: dict[str, Any]) -> None:
    receipt["token_ids"][4] = (receipt["token_ids"][4] + 1) % TINY.vocab_size


def change_logprob(receipt: dict[str, Any]) -> None:
    receipt["logprobs"][5] += 2.0**-10


CHANGES: tuple[tuple[Callable[[dict[str, Any]], object], tuple[str, ...]], ...] = (
    (change_token, ("token 4 differs: ",)),
    (
        change_logprob,
        (
            "the log probability of token 5 differs by 0.000977",
            "logprob_digest is not that of its log probabilities",
        ),
    ),
    (lambda receipt: receipt["params"].update(seed=receipt["params"]["seed"] + 1), ("differs: ",)),
    (
        lambda receipt: receipt["params"].update(max_tokens=8),
        ("the receipt has 7 tokens and 7 log probabilities, the replay 8",),
    ),
    (
        lambda receipt: receipt["fingerprint"].update(checkpoint="0" * 32),
        (
            f"the checkpoint does not fit: {'0' * 32} in",
            "its system_fingerprint is not that of its parts",
        ),
    ),
)


def test_a_changed_receipt_is_told_apart(
    cadenza: Cadenza, model: Path, receipts: list[dict[str, Any]], tmp_path: Path
):
    file = written(tmp_path, *(changed(receipts[0], change) for change, _ in CHANGES))
    ran = cadenza("replay", file, "--model", model, "--json")
    assert ran.code == 1
    told = sorted(ran.objects, key=lambda found: found["source"])
    for found, (_, words) in zip(told, CHANGES, strict=True):
        for each in words:
            assert any(each in text for text in found["differences"]), found


def test_the_arithmetic_of_a_receipt_is_told_where_this_machine_has_it(
    cadenza: Cadenza, model: Path, receipts: list[dict[str, Any]], tmp_path: Path
):
    revision = receipts[0]["fingerprint"]["arithmetic"].rpartition("-")[2]
    for name, is_told in (
        (f"scalar-{revision}", True),
        ("scalar-0", False),
        (f"other-{revision}", False),
        (f"portable-{revision}", False),
    ):
        other = changed(receipts[0], lambda each: None)
        other["fingerprint"]["arithmetic"] = name
        ran = cadenza("replay", written(tmp_path, other), "--model", model, "--json")
        (found,) = ran.objects
        told = [each for each in found["differences"] if "CADENZA_CPU_ISA=scalar" in each]
        assert bool(told) is is_told, found


def change_weights(folder: Path) -> None:
    write_model(folder, seed=4)


def change_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "chat_template": settings["chat_template"] + " "}))


def change_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + "\n")


def change_defaults(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (change_weights, "checkpoint"),
        (change_template, "template"),
        (change_tokenizer, "tokenizer"),
        (change_defaults, "defaults"),
    ],
)
def test_the_part_of_another_model_is_named(
    cadenza: Cadenza,
    model: Path,
    receipts: list[dict[str, Any]],
    tmp_path: Path,
    change: Callable[[Path], None],
    part: str,
):
    folder = tmp_path / "other"
    if change is not change_weights:
        shutil.copytree(model, folder)
    change(folder)
    ran = cadenza("replay", written(tmp_path, receipts[0]), "--model", folder)
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert len(lines) == 1
    assert f": the {part} does not fit: " in lines[0]


def test_a_model_of_a_shorter_context_is_told_beside_other_verdicts(
    cadenza: Cadenza, model: Path, receipts: list[dict[str, Any]], tmp_path: Path
):
    longer = changed(receipts[1], lambda each: each["fingerprint"].update(max_model_len=1 << 20))
    file = written(tmp_path, longer, receipts[0])
    ran = cadenza("replay", file, "--model", model, "--json")
    assert ran.code == 1
    refused, equal = ran.objects
    assert "the receipt was changed: its system_fingerprint" in refused["differences"][0]
    assert "the model cannot be opened as the receipt asks: " in refused["differences"][1]
    assert longer["fingerprint"]["checkpoint"] in refused["differences"][1]
    assert equal["is_equal"]


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<!\w)--[a-z][a-z-]*", text))


def test_messages_name_parts_of_the_receipt_and_no_flags_of_other_commands(
    cadenza: Cadenza, model: Path, receipts: list[dict[str, Any]], tmp_path: Path
):
    longer = changed(receipts[0], lambda each: each["fingerprint"].update(max_model_len=1 << 20))
    filled = changed(receipts[0], lambda each: each["params"].update(max_tokens=5000))
    ran = cadenza("replay", written(tmp_path, longer, filled), "--model", model)
    assert ran.code == 1
    assert "the receipt's max_model_len 1048576 is above the model's 8192 positions" in ran.out
    assert "context length is 256 tokens (the receipt's max_model_len)" in ran.out
    assert flags_in(ran.out) == {"--model"}
    for part, given, said in (
        ("activations", "float8", "the receipt's activations 'float8' is not one of"),
        ("max_model_len", 0, "the receipt's max_model_len 0 must be a whole number"),
    ):
        other = {**receipts[0], "fingerprint": {**receipts[0]["fingerprint"], part: given}}
        ran = cadenza("replay", written(tmp_path, other), "--model", model)
        assert ran.code == 2
        assert said in ran.err
        assert not flags_in(ran.err)


def test_a_replay_without_a_model_says_that_it_took_the_bundled_one(
    cadenza: Cadenza, receipts: list[dict[str, Any]], tmp_path: Path
):
    ran = cadenza("replay", written(tmp_path, receipts[0]))
    assert ran.code == 1
    assert "name the receipt's own model with --model" in ran.out.splitlines()[0]
    assert "the checkpoint does not fit" in ran.out


def test_a_file_that_is_no_receipt_is_refused(cadenza: Cadenza, tmp_path: Path):
    for content in ("", "{}", "no", '{"receipt": 1}\n{"receipt": 1}', "[1]"):
        file = tmp_path / "none.json"
        file.write_text(content)
        ran = cadenza("replay", file)
        assert ran.code == 2, ran
        assert "is no receipt" in ran.err
    assert cadenza("replay", tmp_path / "absent").code == 2


def test_a_receipt_of_another_version_is_refused(
    cadenza: Cadenza, receipts: list[dict[str, Any]], tmp_path: Path
):
    ran = cadenza("replay", written(tmp_path, {**receipts[0], "receipt": 2}))
    assert ran.code == 2
    assert "version 2" in ran.err


def test_a_file_for_receipts_that_cannot_be_written_is_refused(
    cadenza: Cadenza, model: Path, tmp_path: Path
):
    file = tmp_path / "no" / "file"
    ran = cadenza("generate", "--model", model, "one", "--receipt", file, *SAMPLED)
    assert ran.code != 0
    assert "cannot be written" in ran.err


def test_the_fingerprint_names_what_answers_depend_on(
    cadenza: Cadenza, model: Path, tmp_path: Path
):
    def answers(folder: Path, *flags: object) -> dict[str, Any]:
        (facts,) = cadenza("info", folder, "--json", *ENGINE, *flags).objects
        return facts["answers"]

    plain = answers(model)
    same = tmp_path / "copy"
    shutil.copytree(model, same)
    assert answers(same) == plain
    assert answers(model, "--max-num-seqs", 3, "--seed", 5, "--scheduler", "plain") == plain
    for flags, name in (
        (("--dtype", "bfloat16"), "activations"),
        (("--quantization", "int8"), "weights"),
        (("--kv-cache-dtype", "int8"), "kv"),
        (("--max-model-len", 200), "max_model_len"),
        (("--ops", "reference"), "arithmetic"),
    ):
        found = answers(model, *flags)
        assert found[name] != plain[name]
        assert found["system_fingerprint"] != plain["system_fingerprint"]
    large = tmp_path / "large"
    write_model(large, replace(TINY, rms_norm_eps=1e-6))
    assert answers(large)["checkpoint"] != plain["checkpoint"]
