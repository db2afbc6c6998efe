"""What cannot work is refused: one line that says what was given, and code 2 (3: not loaded)."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.cli.harness import ENGINE, Cadenza

AT = "--url http://127.0.0.1:1"
REFUSED: Mapping[str, str] = {
    "no-such-command": "no-such-command",
    "generate": "there is no prompt",
    "generate a --no-such-flag": "--no-such-flag",
    "generate a --max-num-seqs many": "--max-num-seqs",
    "generate a --max-num-seqs 0": "--max-num-seqs 0",
    "generate a --backend abacus": "--backend 'abacus'",
    "generate a --logprobs 2": "--logprobs needs --json",
    "generate a --prompts-format text": "give both or neither",
    "generate --prompts-file absent.txt": "'absent.txt' cannot be read",
    "info a --model b": "the model is named twice",
    "info a b": "b",
    "run": "name it first, or by --model",
    "run 'What is this?'": "the first word is the model, and 'What is this?' is none",
    "run MODEL": "there is no prompt",
    "verify --api-key x": "--api-key changes nothing without --url",
    "verify --num-requests 0": "--num-requests 0 must be 1 or more",
    "verify --options some": "--options 'some' is not one of none, all",
    "verify --options all --num-requests 9": "leave --num-requests out",
    f"verify --options all --num-requests 9 {AT}": "leave --num-requests out",
    f"verify --self-test {AT}": "and --self-test is for here",
    f"verify --portable {AT}": "and --portable is for here",
    f"verify --shape tiny-llama {AT}": "and --shape tiny-llama is for here",
    f"verify some/model {AT}": "and the model some/model is for here",
    "bench throughput --concurrency four": "--concurrency",
    "bench throughput --concurrency 0": "--concurrency 0",
    "bench throughput --output-len 1": "--output-len 1",
    "bench throughput --repeats 0": "--repeats 0",
    "bench throughput folder --shape tiny-llama": "--shape",
    "bench startup --repeats 0": "--repeats 0",
    "bench make-checkpoint out --shape tiny-llama --dtype int8": "--dtype 'int8'",
    "bench make-checkpoint out --shape tiny-llama --seed -1": "--seed -1",
    "bench simulate somewhere --step-cost 5,1,1,1": "give one",
    "bench batching --modes static": "continuous",
    "bench batching --modes continuous,dynamic": "'dynamic'",
    "bench batching --modes continuous,continuous": "twice",
    "bench batching --setting E": "--setting",
    "bench batching --setting B --concurrency 4": "--concurrency",
    "bench batching --setting D --modes continuous": "--modes",
    "bench batching --check": "--setting",
    "bench batching --request-rate 0": "--request-rate",
    "bench batching --concurrency 0": "--concurrency",
    "bench batching --num-requests 0": "--num-requests",
    "bench batching --max-num-seqs 0": "--max-num-seqs",
    "bench batching --repeats 0": "--repeats",
    "bench batching --output-len 9:2": "--output-len",
    "bench batching --batching static": "--modes",
    "bench batching --prefix-cache-disk folder": "--prefix-cache-disk",
    "bench batching --setting D --no-enable-prefix-caching": "prefix cache",
    "bench batching --max-model-len 64": "--max-model-len",
    "bench serve URL --concurrency 0": "--concurrency 0",
    "bench serve URL --concurrency x": "'--concurrency': 'x'",
    "bench serve URL --input-len 5:2": "--input-len 5:2",
    "bench serve URL --output-len a:b": "'--output-len': 'a:b'",
    "bench serve URL --request-rate 0": "--request-rate 0",
    "bench serve URL --vocab-size 3": "--vocab-size 3",
    "bench serve URL --num-requests 0": "--num-requests 0",
    "bench serve URL --goodput itl:5": "'itl:5' must be ttft, tpot or e2el",
    "bench serve URL --goodput ttft:0": "'ttft:0' must be",
    "bench serve URL --burstiness 0": "--burstiness 0",
    "bench serve URL --metric-percentiles 50,101": "--metric-percentiles 101",
    "bench serve URL --num-warmups -1": "--num-warmups -1",
    "bench serve URL --max-client-share 0": "--max-client-share 0",
    "bench serve URL --probe-request-rate -1": "--probe-request-rate -1",
    "bench serve URL --sweep 0": "--sweep 0",
    "bench serve URL --sweep 3 --request-rate 2": "each set the rate",
    "bench serve URL --ramp-up-strategy linear": "go together",
    "bench serve URL --ramp-up-end-rps 8": "go together",
    "bench serve URL --dataset sharegpt": "needs --dataset-path",
    "bench serve URL --dataset-path x.json": "draws its prompts",
    "bench serve URL --dataset alpaca": "--dataset 'alpaca' is not one of random, sharegpt",
}
UNREADABLE = {
    "--logit-bias": ("{", "[1]", '{"a": 1}', '{"1": "x"}', "[" * 5000),
    "--stop-token-ids": ("", "a", "1;2"),
    "--allowed-token-ids": ("1,,2",),
    "--speculative": ("yes", "-1", "1.5"),
    "--json-schema": ("no-such-file",),
    "--grammar": ("no-such-file",),
}
UNSERVED = {
    ("--max-tokens", "5000"): "maximum context length is",
    ("--temperature", "-1"): "temperature is -1",
    ("--logprobs", "99", "--json"): "logprobs is 99",
    **{(flag, value): flag for flag, values in UNREADABLE.items() for value in values},
}


def refuse(cadenza: Cadenza, words: list[str], said: str, code: int = 2) -> None:
    ran = cadenza(*words)
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1), ran
    assert re.match("cadenza[a-z -]*: error: ", ran.err)
    assert said in ran.err


@pytest.mark.parametrize("line", REFUSED)
def test_wrong_use_is_refused_in_one_line(cadenza: Cadenza, model: Path, line: str):
    words = {"MODEL": str(model), "URL": "http://127.0.0.1:9"}
    refuse(cadenza, [words.get(each, each) for each in shlex.split(line)], REFUSED[line])


@pytest.mark.parametrize("flags", UNSERVED, ids=lambda flags: " ".join(flags)[:30])
def test_what_no_request_can_have_is_refused(cadenza: Cadenza, model: Path, flags: tuple[str, ...]):
    refuse(cadenza, ["generate", str(model), "the", *flags, *ENGINE], UNSERVED[flags])


def test_a_shape_that_is_not_known_could_not_be_loaded(cadenza: Cadenza):
    refuse(cadenza, ["bench", "throughput", "--shape", "no-such-shape"], "no-such-shape", code=3)
