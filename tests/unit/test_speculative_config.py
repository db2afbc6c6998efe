"""--speculative-config: what is accepted, and what is said otherwise."""

from dataclasses import asdict
from typing import Any

import pytest

from cadenza.config import EngineConfig, config_from_options
from cadenza.errors import ConfigError
from cadenza.speculative_config import SpeculativeConfig, parse_speculative_config


def test_text_and_mappings_give_the_same_config() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
    options = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    expected = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=4)
    assert parse_speculative_config(text) == parse_speculative_config(options) == expected
    config = config_from_options({"speculative_config": options})
    assert config.speculation == EngineConfig(speculative_config=expected).speculation == expected
    mtp = SpeculativeConfig(method="mtp", num_speculative_tokens=3)
    for name in ("mtp", "mimo_mtp"):  # vLLM has both
        named = {"method": name, "num_speculative_tokens": 3}
        assert parse_speculative_config(named) == mtp
    assert EngineConfig().speculation is EngineConfig(speculative_config="none").speculation is None


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("{", "is not JSON"),
        ("", "is not JSON"),
        ("[1]", "not a JSON object"),
        (3, "not a JSON object"),
        ("{}", "names no method"),
        ('{"method": "medusa"}', "'medusa' is not one of ngram"),
        ('{"method": ["ngram"]}', "is not one of ngram"),
        ('{"method": "ngram", "tokens": 3, "k": 1}', "there is no option k, tokens; there are"),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "whole number from 1 to 16"),
        ('{"method": "ngram", "num_speculative_tokens": 2.0}', "whole number from 1 to 16"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "whole number from 1 to 16"),
        ('{"method": "ngram", "prompt_lookup_min": 9}', "is above prompt_lookup_max 5"),
        ('{"method": "ngram", "prompt_lookup_max": 1000}', "from 1 to 64"),
        ('{"method": "draft_model", "model": ""}', "must be a folder, a GGUF file or a hub model"),
        ('{"method": "mtp", "quantization": "int8"}', "quantised; leave it out with mtp"),
        ('{"method": "mtp", "model": "small"}', "a model is only for the method draft_model"),
        ('{"method": "deepseek_mtp"}', "is not one of ngram, draft_model, quantised, mtp"),
    ],
)
def test_what_cannot_be_is_refused_by_name(value: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        config_from_options({"speculative_config": value})
    assert "--speculative-config" in str(caught.value)


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_a_config_is_made_of_its_own_values_again(method: Any) -> None:
    config = SpeculativeConfig(method=method)
    assert config.quantization == "none"
    assert SpeculativeConfig(**asdict(config)) == config
