"""--spec-prefill and a request's spec_prefill: what is accepted, and what is said otherwise."""

import pytest

from cadenza.config import EngineConfig, config_from_options
from cadenza.errors import ConfigError, InvalidRequestError
from cadenza.sparse_prefill import (
    PromptSpan,
    SpecPrefillChoice,
    SpecPrefillConfig,
    as_spec_prefill,
    parse_spec_prefill,
)


def test_text_and_mappings_give_the_same_config() -> None:
    expected = SpecPrefillConfig(model="m", keep=0.1, threshold=100, when="cold")
    text = '{"model": "m", "keep": 0.1, "threshold": 100, "when": "cold"}'
    options = {"model": "m", "keep": 0.1, "threshold": 100, "when": "cold"}
    assert parse_spec_prefill(text) == parse_spec_prefill(options) == expected
    config = config_from_options({"spec_prefill": options})
    assert config.sparse_prompts == EngineConfig(spec_prefill=expected).sparse_prompts == expected
    assert EngineConfig().sparse_prompts is EngineConfig(spec_prefill="none").sparse_prompts is None
    assert EngineConfig(spec_prefill="{}").sparse_prompts == SpecPrefillConfig()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "not a JSON object"),
        ({"kept": 0.3, "draft": "m"}, "there is no option draft, kept; there are model"),
        ({"model": ""}, "must be a folder, a GGUF file or a hub model"),
        ({"keep": 0}, "keep 0 must be a number from 0.01 to 1"),
        ({"keep": float("nan")}, "keep nan must be a number"),
        ({"keep": True}, "keep True must be a number"),
        ({"threshold": -1}, "threshold -1 must be a whole number from 0"),
        ({"head": 2.0}, "head 2.0 must be a whole number"),
        ({"when": "hot"}, "'hot' is not one of always, cold"),
        ({"quantization": "int2"}, "'int2' is not one of none, int8, int4"),
        ({"force": 1}, "force 1 must be true or false"),
    ],
)
def test_a_wrong_option_is_refused_by_name(value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        config_from_options({"spec_prefill": value})
    assert "--spec-prefill" in str(caught.value)


def test_a_requests_choice_is_a_word_or_some_of_the_servers_settings() -> None:
    assert [as_spec_prefill(each) for each in (None, True, False)] == [None, True, False]
    chosen = as_spec_prefill({"keep": 1, "spans": [[3, 9], (40, 41)]})
    assert chosen == SpecPrefillChoice(keep=1.0, spans=(PromptSpan(3, 9), PromptSpan(40, 41)))


@pytest.mark.parametrize(
    "value",
    [
        *("on", 0.3, {"model": "m"}, {"keep": 2}, {"keep": "0.3"}, {"threshold": 1.5}),
        *({"when": "never"}, {"spans": [[3, 3]]}, {"spans": [[-1, 3]]}, {"spans": [3, 4]}),
        *({"spans": {"a": 1}}, {"spans": [[0, 1]] * 65}),
    ],
)
def test_a_wrong_choice_of_a_request_is_refused(value: object) -> None:
    with pytest.raises(InvalidRequestError, match="spec_prefill"):
        as_spec_prefill(value)
