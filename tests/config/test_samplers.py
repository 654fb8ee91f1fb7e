"""Orders of samplers under the names of several servers, and what a chain is made of."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.config.errors import ParameterError
from penstock.config.samplers import BY_NAME, SAMPLERS, SamplerParams, Step, order_names, priority_names, sampler_names
from penstock.config.sampling import SamplingParams


def names(**given: Any) -> list[str] | None:
    chain = SamplingParams(**given).chain()
    return None if chain is None else [step.name for step in chain]


def test_requests_that_ask_for_nothing_have_no_chain() -> None:
    usual = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.5, "repetition_penalty": 1.1}
    assert names() is None
    assert names(**usual, presence_penalty=1.0, frequency_penalty=1.0) is None
    assert names(**usual, dry_multiplier=0.0, dry_base=3.0, xtc_threshold=0.3, smoothing_curve=2.0) is None
    assert names(xtc_probability=1.0, xtc_threshold=0.6) is None


def test_the_usual_order() -> None:
    given = {"min_p": 0.1, "xtc_probability": 0.5, "dry_multiplier": 1.0, "temperature": 0.7, "top_n_sigma": 1.0}
    assert names(**given) == ["dry", "top_n_sigma", "temperature", "min_p", "xtc"]
    assert names(**given, temperature_last=True) == ["dry", "top_n_sigma", "min_p", "xtc", "temperature"]


def test_what_an_order_leaves_out_does_not_run() -> None:
    assert names(temperature=0.5, top_k=3, samplers=["top-k"]) == ["top_k"]
    assert names(temperature=0.5, top_k=3, samplers=[]) == []
    assert names(temperature=0.5, top_k=3, min_p=0.1, samplers="mkt") == ["min_p", "top_k", "temperature"]
    assert names(adaptive_target=0.3, min_p=0.1, samplers=["adaptive_p", "min_p"]) == ["min_p", "adaptive_p"]


def test_mirostat_leaves_filters_out() -> None:
    assert names(mirostat=2, top_k=3, xtc_probability=1.0, temperature=0.5, dry_multiplier=1.0) == [
        "dry", "temperature", "mirostat",
    ]  # fmt: skip
    assert names(mirostat=1, temperature=0.5, samplers=["top_k"]) == ["temperature", "mirostat"]


def test_a_range_of_no_tokens_switches_penalties_off() -> None:
    assert names(repetition_penalty=1.2, repeat_last_n=0) == []
    assert names(repetition_penalty=1.2, repeat_last_n=64) == ["penalties"]
    assert names(repeat_last_n=64) is None


def test_steps_have_their_parameters_in_order() -> None:
    chain = SamplerParams(dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=3, dry_penalty_last_n=64).chain()
    assert chain == (Step("dry", (0.8, 2.0, 3.0, 64.0)),)


def test_names_of_other_servers() -> None:
    llama = ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
    ours = ("penalties", "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature")
    assert sampler_names(llama) == sampler_names("edskypmxt") == sampler_names(";".join(llama)) == ours
    assert (sampler_names("temp"), sampler_names("Top-K")) == (("temperature",), ("top_k",))
    assert (sampler_names("typ"), sampler_names("tk")) == (("typical_p",), ("temperature", "top_k"))
    assert sampler_names(["TOP-K", "top_k", " temp "]) == ("top_k", "temperature")


def test_priority() -> None:
    found = priority_names("temperature\ndynamic_temperature\nquadratic_sampling\ntop_k\nencoder_repetition_penalty")
    assert found[-3:] == ("temperature", "smoothing", "top_k")
    assert set(found) == set(BY_NAME) and len(found) == len(SAMPLERS)
    assert priority_names(["top_p", "top_k"])[-2:] == ("top_p", "top_k")


def test_kobold_order() -> None:
    found = order_names([6, 0, 1, 3, 4, 2, 5])
    wanted = ("penalties", "top_k", "top_a", "tfs", "typical_p", "top_p", "min_p", "temperature", "smoothing")
    assert tuple(name for name in found if name in wanted) == wanted
    assert set(found) == set(BY_NAME)
    assert "top_k" not in order_names([6])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"samplers": ["top_kk"]}, r'samplers is "top_kk"; allowed: names of samplers \(.*\); the nearest .* top_k.'),
        ({"samplers": ["zzzzzz"]}, r'samplers is "zzzzzz"; allowed: names of samplers \([a-z_, ]*\).'),
        ({"samplers": "kq"}, 'samplers is "q"; allowed: a string of the letters e \\(penalties\\), .*'),
        ({"samplers": ["top_k"] * 65}, "samplers is \"65 samplers\"; allowed: at most 64."),
        ({"samplers": 3}, "samplers is 3; allowed: a list or tuple."),
        ({"dry_sequence_breakers": ["x"] * 17}, ".*at most 16."),
        ({"dry_sequence_breakers": ["x" * 41]}, ".*non-empty strings of at most 40 characters."),
        ({"samplers": ["top_k" * 2_000_000]}, 'samplers is "top_k.*; allowed: names of samplers \\([a-z_, ]*\\).'),
        ({"samplers": "top_k;" * 1000}, 'samplers is "65 samplers"; allowed: at most 64.'),
        ({"dry_breaker_ids": [[1]]}, "dry_breaker_ids is .*; allowed: token ids from 0 to 2147483647."),
        ({"dry_breaker_ids": ["1"]}, 'dry_breaker_ids is "1"; allowed: token ids from .*'),
        ({"dry_breaker_ids": [1.0]}, "dry_breaker_ids is 1.0; allowed: token ids from .*"),
        ({"dry_breaker_ids": [10**30]}, "dry_breaker_ids is 10+; allowed: token ids from .*"),
        ({"dry_breaker_ids": range(5)}, "dry_breaker_ids is .*; allowed: a list or tuple."),
        ({"dry_breaker_ids": [1] * 4097}, 'dry_breaker_ids is "4097 entries"; allowed: at most 4096 token ids.'),
        ({"dry_breaker_sequences": [1, 2]}, "dry_breaker_sequences is 1; allowed: a list or tuple."),
        ({"dry_breaker_sequences": [[1, "2"]]}, 'dry_breaker_sequences is "2"; allowed: token ids from .*'),
        ({"dry_breaker_sequences": [[1]] * 4097}, ".*at most 4096."),
        ({"dry_breaker_sequences": [[1] * 9000] * 2}, ".*at most 16384 tokens in all."),
        ({"dry_breaker_mask": [1]}, 'dry_breaker_mask is "list"; allowed: bytes, at most 65536.'),
        ({"dry_breaker_mask": b"a" * 65537}, "dry_breaker_mask is .*; allowed: bytes, at most 65536."),
        ({"xtc_protected_ids": [True]}, "xtc_protected_ids is true; allowed: token ids from .*"),
        ({"bad_words_ids": [[10**30]]}, "bad_words is 10+; allowed: token ids from .*"),
        ({"top_a": 1.5}, r"top_a is 1.5; allowed: a finite number in \[0, 1\]."),
        ({"mirostat": 3}, "mirostat is 3; allowed: an integer from 0 to 2."),
        ({"mirostat": True}, "mirostat is true; allowed: an integer from 0 to 2."),
        ({"watermark": 1}, "watermark is 1; allowed: true or false."),
        ({"top_n_sigma": float("nan")}, "top_n_sigma is .*"),
    ],
)  # fmt: skip
def test_what_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ParameterError) as refused:
        SamplingParams(**given)
    assert re.fullmatch(told, str(refused.value)), str(refused.value)


def test_unknown_numbers_of_an_order() -> None:
    with pytest.raises(ParameterError, match="sampler_order is 7; allowed: an integer from 0 to 6"):
        order_names([7])


def test_sequences_without_tokens_are_left_out() -> None:
    assert SamplingParams(dry_breaker_sequences=[[], [1, 2], ()]).dry_breaker_sequences == ((1, 2),)
