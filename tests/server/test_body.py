"""Strict JSON."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import limits
from penstock.config.errors import RequestError
from penstock.server.body import parse_json


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "Expecting value"),
        (b"{", "line 1"),
        (b"[1]", "allowed: an object"),
        (b"null", "allowed: an object"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": Infinity}', "Infinity"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": -1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": 1, "a": 2}', "appears twice"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "UTF-8"),
        (b"\xef\xbb\xbf{}", "line 1, column 1"),
        (b"{" + b'"a":{' * 80 + b"}" * 81, "deeper"),
        (b"[" * 100_000, ""),
        (b'{"a":' * 100_000, ""),
        (b'{"a": "\n"}', "control character"),
        (b'{"a": 1} x', "Extra data"),
        (b'{"a": [' + b"1," * (2**21 + 1) + b"1]}", "2097152 values"),
    ],
)
def test_what_is_not_acceptable(raw: bytes, said: str) -> None:
    with pytest.raises(RequestError, match="not acceptable JSON") as caught:
        parse_json(raw)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 250


def test_depth_up_to_the_limit() -> None:
    deep: object = 1
    for _ in range(limits.MAX_JSON_DEPTH - 1):
        deep = [deep]
    assert parse_json(json.dumps({"a": deep}).encode())
    with pytest.raises(RequestError, match="deeper"):
        parse_json(json.dumps({"a": [[deep]]}).encode())


def test_paired_surrogates_are_one_character() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}') == {"a": "😀"}


_STEADY = settings(deadline=None, derandomize=True, database=None)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@_STEADY
@given(st.dictionaries(st.text(), _VALUES, max_size=5), st.booleans())
def test_all_proper_json_is_read_as_it_is(value: dict[str, object], ascii_only: bool) -> None:
    assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@_STEADY
@given(st.binary(max_size=200))
def test_any_bytes_give_an_object_or_a_refusal(raw: bytes) -> None:
    result: object = {}
    with suppress(RequestError):
        result = parse_json(raw)
    assert isinstance(result, dict)
