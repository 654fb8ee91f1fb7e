"""Samplers by the names of other servers, as bodies have them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.config.errors import ParameterError
from penstock.config.samplers import SAMPLERS, order_names
from penstock.config.sampling import SamplingParams
from penstock.server.dialects.ollama.schema import OllamaChatBody
from penstock.server.dialects.ollama.translate import chat_call
from penstock.server.dialects.openai.schema import ChatBody, CompletionBody
from penstock.server.sampler_fields import SamplerBody
from penstock.server.sampling import SamplingBody, sampling_params

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "a"}]


def asked(**fields: Any) -> SamplingParams:
    return sampling_params(ChatBody.model_validate({"messages": MESSAGES, **fields}), {})


def test_every_parameter_has_a_field() -> None:
    fields = SamplerBody.model_fields.keys() | SamplingBody.model_fields.keys()
    named = {name for sampler in SAMPLERS for name in sampler.parameters}
    assert named - fields == {"watermark_key"}  # a server's own
    assert SamplerBody.model_fields.keys() <= CompletionBody.model_fields.keys()


def test_fields_are_what_sampling_params_says() -> None:
    values = {
        "samplers": ["dry", "typ_p"], "temperature_last": True, "repeat_last_n": 64, "repetition_decay": 3,
        "no_repeat_ngram_size": 3, "dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3,
        "dry_penalty_last_n": 100, "dry_sequence_breakers": ["\n"], "watermark": True, "watermark_gamma": 0.4,
        "watermark_delta": 1.0, "top_n_sigma": 1.5, "dynatemp_range": 0.5, "dynatemp_exponent": 2.0,
        "smoothing_factor": 0.3, "smoothing_curve": 1.5, "top_a": 0.2, "tfs": 0.9, "epsilon_cutoff": 3.0,
        "eta_cutoff": 4.0, "xtc_probability": 0.5, "xtc_threshold": 0.2, "adaptive_target": 0.3,
        "adaptive_decay": 0.8, "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2,
    }  # fmt: skip
    params = asked(**values)
    expected = {**values, "samplers": ("dry", "typical_p"), "dry_sequence_breakers": ("\n",)}
    assert {name: getattr(params, name) for name in values} == expected


@pytest.mark.parametrize(
    ("sent", "ours"),
    [
        ({"sampler_order": [0, 5]}, {"samplers": order_names([0, 5])}),
        ({"repeat_penalty": 1.2, "penalty_range": 64}, {"repetition_penalty": 1.2, "repeat_last_n": 64}),
        ({"repetition_penalty_range": 0}, {"repeat_last_n": -1}),
        ({"dry_range": 0}, {"dry_penalty_last_n": -1}),
        ({"nsigma": 1.5, "typical": 0.5, "tfs_z": 0.9}, {"top_n_sigma": 1.5, "typical_p": 0.5, "tfs": 0.9}),
        ({"mirostat_mode": 2}, {"mirostat": 2}),
        ({"dynatemp_min": 0.5, "dynatemp_max": 1.5}, {"temperature": 1.0, "dynatemp_range": 0.5}),
        ({"temperature": 0.3, "dynatemp_min": 0.5, "dynatemp_max": 1.5}, {"temperature": 1.0, "dynatemp_range": 0.5}),
        ({"temperature": 1.0, "dynatemp_min": 0, "dynatemp_max": 0}, {"temperature": 1.0, "dynatemp_range": 0.0}),
        ({"dynatemp_min": 0, "dynatemp_max": 0, "dynatemp_range": 0.5}, {"dynatemp_range": 0.5}),
        ({"tfs_z": 2.0}, {"tfs": 1.0}),
        ({"samplers": "temp"}, {"samplers": ("temperature",)}),
        ({"dry_sequence_breakers": '["\\n", ":"]'}, {"dry_sequence_breakers": ("\n", ":")}),
        ({"dry_sequence_breakers": '"\\n", "b"'}, {"dry_sequence_breakers": ("\n", "b")}),
        ({"dry_sequence_breakers": ""}, {"dry_sequence_breakers": ()}),
        ({"stop_regex": "a+"}, {"stop_regex": ("a+",)}),
        ({"cfg_scale": 2}, {"guidance_scale": 2.0, "negative_prompt": None}),
        (
            {"guidance_scale": 1.5, "cfg_scale": 1.5, "cfg_negative_prompt": "b"},
            {"guidance_scale": 1.5, "negative_prompt": "b"},
        ),
        ({"stop_regex": ["a+", "b"]}, {"stop_regex": ("a+", "b")}),
        ({"banned_strings": "a shiver"}, {"banned_strings": ("a shiver",)}),
        (
            {"banned_strings": ["a"], "banned_tokens": ["b", 3]},
            {"banned_strings": ("a", "b"), "bad_words_ids": ((3,),)},
        ),
        ({"custom_token_bans": "5, 7,,5"}, {"bad_words_ids": ((5,), (7,))}),
        ({"custom_token_bans": [5], "banned_tokens": [7]}, {"bad_words_ids": ((7,), (5,))}),
        ({"banned_strings": [], "banned_tokens": [], "custom_token_bans": ""}, {"banned_strings": ()}),
    ],
)
def test_names_of_other_servers(sent: dict[str, Any], ours: dict[str, Any]) -> None:
    params = asked(**sent)
    assert {name: getattr(params, name) for name in ours} == ours


@pytest.mark.parametrize(
    ("sent", "param", "told"),
    [
        ({"custom_token_bans": "5 and 7"}, "custom_token_bans", "with commas between them"),
        ({"custom_token_bans": "-5"}, "custom_token_bans", "token ids from 0"),
        ({"tfs": 0.5, "tfs_z": 0.6}, "tfs_z", "which say the same"),
        ({"typical": 0.5, "typical_p": 0.6}, "typical", "which say the same"),
        ({"samplers": ["top_k"], "sampler_order": [0]}, "sampler_order", "which say the same"),
        ({"dynatemp_min": 0.5}, "dynatemp_min", "and both of them"),
        ({"dynatemp_min": 0.5, "dynatemp_max": 0.2}, "dynatemp_min", "up to dynatemp_max"),
        (
            {"dynatemp_min": 0.5, "dynatemp_max": 1.5, "dynatemp_range": 0.1},
            "dynatemp_range",
            "dynatemp_min and dynatemp_max, which say the same",
        ),
        ({"dry_sequence_breakers": "[" * 4000}, "dry_sequence_breakers", "a text that holds one as JSON"),
        ({"dry_sequence_breakers": "a"}, "dry_sequence_breakers", "a text that holds one as JSON"),
        ({"dry_sequence_breakers": "[1]"}, "dry_sequence_breakers", "a text that holds one as JSON"),
        ({"dry_sequence_breakers": '"a"' + ', "a"' * 16}, "dry_sequence_breakers", "at most 16"),
        ({"sampler_priority": ["temperatur"]}, "sampler_priority", "the nearest to it is temperature"),
    ],
)
def test_what_does_not_go_together(sent: dict[str, Any], param: str, told: str) -> None:
    with pytest.raises(ParameterError, match=told) as refused:
        asked(**sent)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "sent",
    [
        {"samplers": ["x" * 41]}, {"samplers": "x" * 4097}, {"samplers": ["top_k"] * 65},
        {"sampler_priority": ["x" * 41]}, {"sampler_priority": "x" * 4097}, {"dry_sequence_breakers": "x" * 4097},
    ],
)  # fmt: skip
def test_long_texts_are_refused_by_their_length(sent: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="should have at most"):
        asked(**sent)


def test_a_tail_of_all_tokens_is_off_for_ollama() -> None:
    body = {"model": "m", "messages": MESSAGES, "options": {"tfs_z": 1.5}}
    call = chat_call(OllamaChatBody.model_validate(body), {})
    assert call.request is not None
    assert call.request.sampling.tfs == 1.0


def test_ollama_options() -> None:
    options = {"repeat_last_n": 64, "tfs_z": 0.9, "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2}
    call = chat_call(OllamaChatBody.model_validate({"model": "m", "messages": MESSAGES, "options": options}), {})
    assert call.request is not None
    params = call.request.sampling
    assert (params.repeat_last_n, params.tfs, params.mirostat) == (64, 0.9, 2)
    assert (params.mirostat_tau, params.mirostat_eta) == (4.0, 0.2)
