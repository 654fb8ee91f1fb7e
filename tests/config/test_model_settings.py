"""Settings of a model's files that its operator gives other values."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.config.errors import ConfigError
from penstock.config.model_settings import PoolerSettings, as_json, overridden, with_pooling
from penstock.config.options import EngineOptions
from penstock.config.resolve import validate


def test_objects_are_joined_and_other_values_replaced() -> None:
    config = {"a": 1, "rope": {"kind": "yarn", "factor": 2.0}, "layers": [1, 2]}
    given = as_json({"rope": {"factor": 4.0}, "layers": [3], "b": None}, "hf_overrides")
    assert overridden(config, given) == {
        "a": 1,
        "rope": {"kind": "yarn", "factor": 4.0},
        "layers": [3],
        "b": None,
    }
    assert config["rope"] == {"kind": "yarn", "factor": 2.0}
    assert overridden(config, None) is config


def test_options_hold_one_spelling() -> None:
    spellings: list[Any] = [{"b": 1, "a": {}}, '{"a": {}, "b": 1}', '{ "b":1,"a":{} }']
    assert len({EngineOptions(hf_overrides=one) for one in spellings}) == 1
    assert EngineOptions(hf_overrides="{}") == EngineOptions(pooler_config="{}") == EngineOptions()


@pytest.mark.parametrize(
    "text", ["", "[1]", "1", "{", '{"a": NaN}', '{"a":' * 40 + "1" + "}" * 40, '{"a":' * 9999, '"' + "x" * 70_000 + '"']
)
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--hf-overrides"):
        EngineOptions(hf_overrides=text)


def test_vllms_names() -> None:
    given = {"pooling_type": "mean", "normalize": False, "enable_chunked_processing": True, "max_embed_len": 64}
    assert PoolerSettings.of(json.dumps(given)) == PoolerSettings("MEAN", False, None, True, 64)
    assert PoolerSettings.of('{"seq_pooling_type": "CLS", "step_tag_id": null}') == PoolerSettings("CLS")
    assert PoolerSettings.of(None) == PoolerSettings()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"pooling_type": "STEP"}, "allowed: LAST, CLS, MEAN, ALL"),
        ({"pooling_type": 3}, "allowed: LAST"),
        ({"max_embed_len": 10}, "only with enable_chunked_processing"),
        ({"enable_chunked_processing": 1}, "true or false"),
        ({"enable_chunked_processing": True, "pooling_type": "ALL"}, "one vector"),
        ({"dimensions": 0}, "from 1"),
        ({"dimensions": True}, "from 1"),
        ({"logit_bias": 1.0}, "Leave it out"),
        ({"normalise": True}, "there are: pooling_type"),
        ({"normalize": True, "softmax": False}, "twice"),
        ({"pooling_type": "CLS", "seq_pooling_type": "MEAN"}, "twice"),
    ],
)
def test_settings_that_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        validate(EngineOptions(pooler_config=json.dumps(given)))


def test_pooling_as_llama_server_says_it() -> None:
    assert with_pooling(None, "mean") == {"pooling_type": "MEAN"}
    assert with_pooling('{"dimensions": 4}', "none") == {"dimensions": 4, "pooling_type": "ALL"}
    assert with_pooling(None, "rank") == {}
    with pytest.raises(ConfigError, match="leave one out"):
        with_pooling('{"pooling_type": "CLS"}', "mean")
