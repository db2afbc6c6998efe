"""Fingerprints and receipts in answers, streamed or not, computed again by `replay` and by
/v1/receipts/replay; what is changed, foreign or too long is told or refused."""

import json
import struct
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cadenza.cli import main
from cadenza.errors import InvalidRequestError
from cadenza.fingerprint import Fingerprint, Receipt
from cadenza.frontend.loaded_model import LoadedModel
from cadenza.frontend.receipts import ReceiptSeal
from cadenza.server.operations.replay import MAX_TOKENS, check_fingerprint, place_of_difference
from cadenza.verification.replay import read_receipts, replay_receipts
from tests.ports import refusing_port
from tests.server.dialects import events_of
from tests.server.harness import RunningServer, WatchedService, wait_until

COMPLETION = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 1.0, "n": 2}
CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 9, "seed": 4}
CALLS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


def events(server: RunningServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [*events_of(server.post(path, {**body, "stream": True}).content)]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_every_answer_has_the_fingerprint_of_the_model_list(
    bundled: RunningServer, loaded: LoadedModel, path: str, body: dict[str, Any]
):
    expected = loaded.fingerprint.digest
    assert bundled.get("/v1/models").json()["data"][0]["system_fingerprint"] == expected
    assert bundled.post(path, body).json()["system_fingerprint"] == expected
    assert {each["system_fingerprint"] for each in events(bundled, path, body)} == {expected}


def test_the_model_list_has_the_sampling_of_requests_that_set_none(bundled: RunningServer):
    assert bundled.get("/v1/models").json()["data"][0]["default_sampling_params"] == {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "source": "model",
    }


def test_receipts_of_an_answer_are_replayed_to_the_bit(bundled: RunningServer, tmp_path: Path):
    lines: list[str] = []
    for (path, body), stream in product(CALLS, (False, True)):
        asked = {**body, "receipt": True}
        answers = events(bundled, path, asked) if stream else [bundled.post(path, asked).json()]
        choices = [choice for answer in answers for choice in answer["choices"]]
        ended = [each for each in choices if each["finish_reason"] is not None]
        assert [each["index"] for each in choices if "receipt" in each] == [
            each["index"] for each in ended
        ]
        lines += [json.dumps(each["receipt"]) for each in ended]
        assert all("logprobs" not in each or each["logprobs"] is None for each in choices)
    assert len(lines) == 6
    assert not any("story" in line or "Once" in line for line in lines)
    file = tmp_path / "receipts.jsonl"
    file.write_text("\n".join(lines))
    verdicts = [*replay_receipts(None, read_receipts(file))]
    assert [each.differences for each in verdicts] == [()] * 6
    tokens = [tuple(json.loads(line)["token_ids"]) for line in lines]
    assert len(set(tokens)) == 5, "samples have seeds of their own; the chats have one seed"


def test_an_answer_with_tools_has_a_receipt_unless_it_has_a_call(
    bundled: RunningServer, tmp_path: Path
):
    """A call is constrained, which a receipt cannot tell."""
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    asked = {"tools": [tool], "receipt": True, "max_tokens": 40, "temperature": 0}

    def choice_of(question: str) -> dict[str, Any]:
        body = {**asked, "messages": [{"role": "user", "content": question}]}
        return bundled.post("/v1/chat/completions", body).json()["choices"][0]

    called = choice_of("What is the weather in Paris?")
    assert called["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    assert "receipt" not in called
    told = choice_of("Thank you.")
    assert "tool_calls" not in told["message"]
    file = tmp_path / "receipts.jsonl"
    file.write_text(json.dumps(told["receipt"]))
    assert [each.differences for each in replay_receipts(None, read_receipts(file))] == [()]


def test_an_engine_without_a_fingerprint_refuses_receipts(server: RunningServer):
    answer = server.post("/v1/completions", {"prompt": "the", "receipt": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "receipt"
    assert server.post("/v1/completions", {"prompt": "the", "receipt": False}).status_code == 200


PATH = "/v1/receipts/replay"
BODY = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 1.0, "receipt": True}


def receipt_of(server: RunningServer, **fields: Any) -> dict[str, Any]:
    answer = server.post("/v1/completions", {**BODY, **fields}).json()
    return answer["choices"][-1]["receipt"]


def flipped(logprob: float) -> float:
    """The float32 with its lowest bit changed."""
    (bits,) = struct.unpack("<I", struct.pack("<f", logprob))
    return struct.unpack("<f", struct.pack("<I", bits ^ 1))[0]


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"seed": 7, "stop": ["the"]}, {"stream": False}])
def test_an_own_receipt_is_equal_and_was_computed_alone(
    bundled: RunningServer, fields: dict[str, Any]
) -> None:
    receipt = receipt_of(bundled, **fields)
    again = bundled.post(PATH, {"receipt": receipt}).json()
    assert again == {
        "equal": True,
        "alone": True,
        "beside": 0,
        "tokens": receipt["token_ids"],
        "logprobs": receipt["logprobs"],
        "bits": [struct.pack(">f", each).hex() for each in receipt["logprobs"]],
        "digest": receipt["logprob_digest"],
        "expected_digest": receipt["logprob_digest"],
        "fingerprint": receipt["system_fingerprint"],
        "first_difference": None,
    }


def test_the_command_asks_the_server_that_gave_a_receipt(
    bundled: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    receipt, file = receipt_of(bundled), tmp_path / "r.json"
    file.write_text(json.dumps(receipt))
    assert main(["replay", str(file), "--url", bundled.url]) == 0
    assert capsys.readouterr().out == f"{file}: equal, {len(receipt['token_ids'])} tokens\n"
    receipt["logprobs"][3] = flipped(receipt["logprobs"][3])
    file.write_text(json.dumps(receipt))
    assert main(["replay", str(file), "--url", f"{bundled.url}/v1"]) == 1
    assert "the log probability of token 3 differs" in capsys.readouterr().out
    receipt["token_ids"][2] ^= 1
    file.write_text(json.dumps(receipt))
    assert main(["replay", str(file), "--url", bundled.url, "--json"]) == 1
    (told,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (told["is_equal"], len(told["differences"])) == (False, 1)
    with refusing_port() as port:
        assert main(["replay", str(file), "--url", f"http://127.0.0.1:{port}"]) == 2
    assert "the connection is refused" in capsys.readouterr().err


def test_a_receipt_of_a_stream_and_one_that_passed_through_javascript_are_own(
    bundled: RunningServer,
) -> None:
    body = {**BODY, "stream": True, "seed": (1 << 60) + 1}
    lines = bundled.post("/v1/completions", body).text.splitlines()
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    receipt = choices[-1]["receipt"]
    seed = receipt["params"]["seed"]
    rounded = int(float(seed))
    assert rounded != seed, "else this test shows nothing"
    receipt["params"]["seed"] = rounded
    receipt["params"]["temperature"] = 1
    assert bundled.post(PATH, {"receipt": receipt}).json()["equal"]


def test_a_receipt_with_one_bit_changed_is_unequal_at_that_place(bundled: RunningServer) -> None:
    receipt = receipt_of(bundled)
    receipt["logprobs"][5] = flipped(receipt["logprobs"][5])
    again = bundled.post(PATH, {"receipt": receipt}).json()
    assert (again["equal"], again["first_difference"]) == (False, 5)
    receipt = receipt_of(bundled)
    receipt["logprob_digest"] = "0" + receipt["logprob_digest"][1:-1] + "0"
    again = bundled.post(PATH, {"receipt": receipt}).json()
    assert (again["equal"], again["first_difference"]) == (False, None)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("prompt_token_ids",), [5, 6, 7]),
        (("params", "temperature"), 0.5),
        (("params", "seed"), 12),
        (("params", "max_tokens"), 400),
        (("seal",), "0" * 80),
        (("seal",), "no seal"),
    ],
)
def test_a_receipt_whose_request_was_changed_or_that_has_no_seal_is_refused(
    bundled: RunningServer, path: tuple[str, ...], value: object
) -> None:
    receipt = receipt_of(bundled)
    *parents, name = path
    place = receipt
    for each in parents:
        place = place[each]
    place[name] = value
    refused = bundled.post(PATH, {"receipt": receipt})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "receipt"
    assert "not one that this server gave you" in error["message"]
    assert "`cadenza replay`" in error["message"]


def test_another_fingerprint_is_refused_with_the_part_that_does_not_fit(
    bundled: RunningServer,
) -> None:
    receipt = receipt_of(bundled)
    receipt["fingerprint"]["weights"] = "int4"
    refused = bundled.post(PATH, {"receipt": receipt})
    assert refused.status_code == 400
    assert "the weights is int4 in the receipt" in refused.json()["error"]["message"]


def test_a_fingerprint_names_each_part_that_does_not_fit(loaded: LoadedModel) -> None:
    here: Fingerprint = loaded.fingerprint
    check_fingerprint(here, here)
    other = msgspec.structs.replace(here, checkpoint="x", kv="int8")
    with pytest.raises(InvalidRequestError, match=r"checkpoint is x .*; the kv is int8 "):
        check_fingerprint(other, here)


@pytest.mark.parametrize(
    ("receipt", "words"),
    [
        (3, "receipt is none"),
        ({}, "missing required field"),
        ({"receipt": 1, "other": 3}, "receipt is none"),
    ],
)
def test_what_is_no_receipt_is_refused(
    scripted: RunningServer, receipt: object, words: str
) -> None:
    refused = scripted.post(PATH, {"receipt": receipt})
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]


def test_a_receipt_of_too_many_tokens_or_another_version_is_refused(bundled: RunningServer) -> None:
    receipt = receipt_of(bundled)
    long = {**receipt, "token_ids": [5] * (MAX_TOKENS + 1)}
    refused = bundled.post(PATH, {"receipt": long})
    assert refused.status_code == 400
    assert "has 513 tokens; at most 512" in refused.json()["error"]["message"]
    refused = bundled.post(PATH, {"receipt": {**receipt, "receipt": 2}})
    assert "has the version 2; this server reads 1" in refused.json()["error"]["message"]


def test_a_replay_beside_others_says_how_many_and_a_second_one_meanwhile_is_refused(
    bundled: RunningServer, watched: WatchedService
) -> None:
    receipt = receipt_of(bundled)
    watched.gather(2)  # the first one's tokens wait for a request beside it
    replaying = bundled.posting(PATH, {"receipt": receipt})
    wait_until(lambda: watched.load().num_open == 1)
    refused = bundled.post(PATH, {"receipt": receipt})
    assert refused.status_code == 429
    assert "one at a time" in refused.json()["error"]["message"]
    bundled.post("/v1/completions", {"prompt": "the", "max_tokens": 2})
    again = replaying.result().json()
    assert (again["equal"], again["alone"], again["beside"]) == (True, False, 1)


def test_a_seal_is_of_a_tenant_and_of_a_secret(bundled: RunningServer) -> None:
    receipt = msgspec.convert(receipt_of(bundled), Receipt)
    seal = ReceiptSeal(b"secret")
    sealed = seal.sealed(receipt, "a")
    assert seal.opened(sealed, "a") == sealed
    assert seal.opened(sealed, "b") is None
    assert ReceiptSeal(b"another").opened(sealed, "a") is None
    thinned = seal.sealed(msgspec.structs.replace(receipt, kept=b"\x05"), "a")
    assert seal.opened(thinned, "a") == thinned
    for kept in (b"\x07", msgspec.UNSET):
        assert seal.opened(msgspec.structs.replace(thinned, kept=kept), "a") is None


def test_answers_of_other_lengths_or_ends_differ_where_they_cease_to_be_equal(
    bundled: RunningServer,
) -> None:
    receipt = msgspec.convert(receipt_of(bundled), Receipt)
    shorter = msgspec.structs.replace(
        receipt, token_ids=receipt.token_ids[:9], logprobs=receipt.logprobs[:9]
    )
    other = msgspec.structs.replace(receipt, token_ids=(*receipt.token_ids[:3], 1, 2))
    another_end = "length" if receipt.finish_reason == "stop" else "stop"
    ended = msgspec.structs.replace(receipt, finish_reason=another_end)
    assert place_of_difference(receipt, receipt) is None
    assert place_of_difference(shorter, receipt) == place_of_difference(receipt, shorter) == 9
    assert place_of_difference(receipt, other) == 3
    assert place_of_difference(receipt, ended) == len(receipt.token_ids)
