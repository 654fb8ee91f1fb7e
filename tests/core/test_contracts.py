"""Sampling parameters refuse nonsense; plans and results can cross a process."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from penstock.config.adapters import AdapterUse
from penstock.config.cache_spec import CacheGroup, CacheKind, CacheSpec, group_layers
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import ParameterError
from penstock.config.given_rows import GivenRows
from penstock.config.media import EncoderInput, MediaSpan
from penstock.config.request_facts import RequestFacts
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import (
    CacheOp,
    CacheOpKind,
    EncoderWork,
    NewSequence,
    Proposal,
    ScheduledTokens,
    SlotResult,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
    last_sample,
)  # fmt: skip
from penstock.core.request import EngineOutput, EngineRequest, FinishReason

NUMBERS = (
    "temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
INTEGERS = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")


@pytest.mark.parametrize("name", NUMBERS + INTEGERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", True, [1], -(2**70), 2**70, 10**400, 1e300])
def test_out_of_range_values_name_field_value_and_range(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value) and "allowed" in str(caught.value)


@pytest.mark.parametrize(
    "field, value",
    [
        ("n", 129), ("stop", ("x",) * 17), ("stop", ("",)), ("stop", ("x" * 1025,)), ("bad_words", ("",)),
        ("bad_words_ids", ((),)), ("bad_words_ids", ((1,) * 1025,)), ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((-1, 0.0),)), ("logit_bias", tuple((i, 0.0) for i in range(1025))),
        ("allowed_token_ids", ()), ("allowed_token_ids", (-1,)), ("stop_token_ids", (1.5,)), ("logprobs", -2),
        ("stop_regex", ("",)), ("stop_regex", ("x",) * 9), ("stop_regex", ("x" * 513,)), ("bad_words", ("x",) * 129),
        ("min_tokens", -1), ("top_p", 0.0), ("repetition_penalty", 0.0),
    ],
)  # fmt: skip
def test_lists_and_edges_are_bounded(field: str, value: Any) -> None:
    with pytest.raises(ParameterError):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    "field, given, kept",
    [
        ("logit_bias", {7: 2, 5: 1.0}, ((5, 1.0), (7, 2))), ("logit_bias", [[5, 1.0]], ((5, 1.0),)),
        ("logit_bias", {}, ()), ("logit_bias", None, ()), ("stop", None, ()), ("bad_words_ids", None, ()),
        ("stop_regex", "x+", ("x+",)), ("stop_regex", None, ()),
        ("stop", "x", ("x",)), ("stop", ["x", "y"], ("x", "y")), ("bad_words", ["x"], ("x",)),
        ("stop_token_ids", [1], (1,)), ("allowed_token_ids", [3, 4], (3, 4)), ("bad_words_ids", [[1, 2]], ((1, 2),)),
    ],
)  # fmt: skip
def test_lists_mappings_and_a_single_stop_string_become_tuples(field: str, given: Any, kept: tuple[Any, ...]) -> None:
    params = SamplingParams(**{field: given})
    assert getattr(params, field) == kept
    assert params == SamplingParams(**{field: kept}) and hash(params) == hash(SamplingParams(**{field: kept}))


@pytest.mark.parametrize(
    "field, value",
    [
        *((field, value) for field in ("stop", "bad_words", "stop_token_ids", "bad_words_ids") for value in (5, {1})),
        ("stop", [5]), ("stop", b"x"), ("bad_words", "x"), ("stop_token_ids", "1"), ("stop_token_ids", [None]),
        ("allowed_token_ids", 5), ("allowed_token_ids", []), ("bad_words_ids", [1]), ("bad_words_ids", ["ab"]),
        ("logit_bias", 5), ("logit_bias", "ab"), ("logit_bias", [5]), ("logit_bias", [(5,)]),
        ("logit_bias", ["ab"]), ("logit_bias", {"5": 1.0}), ("logit_bias", {5: "1"}), ("logit_bias", {1: 0, "x": 0}),
    ],
)  # fmt: skip
def test_what_is_no_list_of_the_right_kind_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match="allowed: ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.param in (field, field.removesuffix("_ids"))


def test_min_tokens_above_max_tokens_is_refused() -> None:
    with pytest.raises(ParameterError, match="at most max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_plans_results_and_requests_survive_encoding() -> None:
    params = SamplingParams(n=2, stop=("a",), logit_bias=((1, 2.0),), seed=2**63, allowed_token_ids=(3, 4))
    span = ScheduledTokens(0, 4, (1, last_sample(3)), 1, 0, True, ((5,), ()), (-1, 0), (7, 8, 9))
    new = NewSequence(0, "id", 1, (1, 2), (3,), 2, ((4, 0), ()), params, (2,), 2**64 - 1)
    ops = (CacheOp(CacheOpKind.COPY, 0, 1, 2, 3), CacheOp(CacheOpKind.LOAD, 1, 0, 2, 16, transfer=9, place=3))
    plan = StepPlan(7, (1,), (new,), ops, (EncoderWork(0, "digest", 0, 2, 1, (4,)),), (span,))
    scored = TokenLogprobs(1, -0.5, 1, ((1, -0.5),))
    rows = (SlotResult(0, (1,), (scored,), (), None),)
    result = StepResult(7, rows, (Proposal(0, (5, 6), (-1, -1)),), (9, 8), (8,), StepTimings(1.0, 2.0, 3.0))
    facts = RequestFacts("tenant", "batch", 1e9, "trace")
    request = EngineRequest(
        "id", (1, 2), params, adapters=(AdapterUse("d", "p", 0.5),), speculate=3,
        media=(MediaSpan("m", 0, 1), MediaSpan("g", 1, 1, GivenRows("bfloat16", 2, b"\0\x3f\0\x40"))),
        encoder=EncoderInput("e", 9), facts=facts,
    )  # fmt: skip
    output = EngineOutput("id", 0, (1,), (scored,), (), FinishReason.STOP, None, 3)
    for value in (plan, result, request, output, EngineStats(miss_reasons=(("evicted", 1),))):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value
    assert plan.num_tokens == 2


def test_layers_with_equal_needs_form_one_group() -> None:
    full, sliding = CacheSpec(CacheKind.FULL, 2, 8, 8), CacheSpec(CacheKind.SLIDING, 2, 8, 4, window=16)
    assert group_layers([sliding, full, sliding]) == (
        CacheGroup(CacheKind.SLIDING, 16, (0, 2), 48),
        CacheGroup(CacheKind.FULL, None, (1,), 32),
    )
    with pytest.raises(ValueError, match="only sliding"):
        CacheSpec(CacheKind.FULL, 1, 8, 8, window=3)
