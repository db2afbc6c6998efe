"""`cadenza verify --options` on the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest

from cadenza.verification.option_matrix import make_matrix
from tests.cli.harness import LIMITS, Ran


@pytest.mark.soak
def test_the_command_plays_the_matrix(cadenza: Callable[..., Ran], model: Path):
    flags = ("--options", "all", "--reference", "solo", "--max-tokens", 4, *LIMITS)
    ran = cadenza("verify", model, *flags)
    assert ran.code == 0, ran.out
    last = ran.out.splitlines()[-1]
    coverage = make_matrix().coverage()
    assert last.startswith(f"REFERENCE-EXACT PASS bitwise requests={coverage.num_combinations} ")
    found = f" options={coverage.num_combinations} pairs={coverage.num_pairs} longest="
    assert found in last


def test_what_did_not_occur_is_no_mismatch(cadenza: Callable[..., Ran], model: Path):
    """Answers of four tokens repeat nothing, so that no draft is accepted."""
    drafts = ("--speculative-config", '{"method": "ngram"}', "--max-tokens", 4)
    flags = (*drafts, "--reference", "solo", "--num-requests", 5, *LIMITS)
    ran = cadenza("verify", model, *flags, "--json")
    assert ran.code == 4, ran.out + ran.err
    (found,) = ran.objects
    assert (found["verdict"], found["passed"], found["mismatch"]) == ("NOT SHOWN", False, None)
    assert all(each["num_equal"] == each["num_streams"] for each in found["modes"])
    assert "REFERENCE-EXACT NOT SHOWN accepted_drafts in overlapped loop" in found["last_line"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--options", "some"), "--options 'some' is not one of none, all"),
        (("--options", "all", "--num-requests", 9), "leave --num-requests out"),
        (("--self-test", "--url", "http://127.0.0.1:1"), "and --self-test is for here"),
        (("--portable", "--url", "http://127.0.0.1:1"), "and --portable is for here"),
        (("--shape", "tiny-llama", "--url", "http://127.0.0.1:1"), "and --shape tiny-llama is"),
        (("some/model", "--url", "http://127.0.0.1:1"), "and the model some/model is for here"),
        (
            ("--options", "all", "--num-requests", 9, "--url", "http://127.0.0.1:1"),
            "leave --num-requests out",
        ),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    cadenza: Callable[..., Ran], flags: tuple[object, ...], said: str
):
    ran = cadenza("verify", *flags)
    assert ran.code == 2
    assert said in ran.err


def test_the_portable_digest_tells_weights_apart(cadenza: Callable[..., Ran], model: Path):
    def digest(*flags: object) -> str:
        given = ("--portable", "--reference", "solo", "--num-requests", 6, "--max-tokens", 4)
        ran = cadenza("verify", *flags, *given, "--json", *LIMITS)
        assert ran.code == 0, ran.out + ran.err
        assert ran.objects[0]["verdict"] == "PASS"
        return ran.objects[0]["digest"]

    assert digest("--shape", "tiny-llama") != digest(model)
