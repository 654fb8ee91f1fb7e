"""Strict JSON."""

from __future__ import annotations

import json
from contextlib import suppress

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config import limits
from penstock.config.errors import RequestError
from penstock.server import strict_json
from penstock.server.strict_json import parse_json


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
        (b'{"a": [' + b"1," * (2**21 + 1) + b"1]}", "524288 values"),
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


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text is large, and cut wherever it can be."""
    monkeypatch.setattr(strict_json, "_PIECE", 8)
    monkeypatch.setattr(strict_json, "_CHUNK", 16)


def read_in_pieces(raw: bytes) -> object:
    return strict_json._Large(raw).value()


@pytest.mark.usefixtures("small_pieces")
@settings(deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_pieces_give_what_the_whole_gives(value: object, ascii_only: bool, indent: int | None) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert read_in_pieces(raw) == value


_JSON_BYTES = st.lists(
    st.sampled_from([
        *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b'"a"', b'"b":', b'\\"', b"\\\\", b"1", b"-", b"true", b" "),
        *(b'"\\ud800"', b"1e999", b"NaN", b"\xff", b'{"a":1,"b":[2]}', b'["x","y,z"]', b'"long string, with: marks {"'),
    ]),
    max_size=14,
).map(b"".join)  # fmt: skip


@pytest.mark.usefixtures("small_pieces")
@settings(
    max_examples=1500, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(_JSON_BYTES)
def test_pieces_are_refused_where_the_whole_is(raw: bytes) -> None:
    try:
        expected: object = strict_json._small(raw)
    except RequestError:
        with pytest.raises(RequestError, match="not acceptable JSON"):
            read_in_pieces(raw)
    else:
        assert read_in_pieces(raw) == expected


@pytest.mark.usefixtures("small_pieces")
def test_escapes_across_chunks() -> None:
    for count in range(40):
        for tail in ('"', "x", '\\"'):
            value = {"a": "\\" * count + tail, "b": [tail * count, {"c,": "}]"}]}
            assert read_in_pieces(json.dumps(value).encode()) == value


def large(value: bytes) -> bytes:
    """An object with enough filling to be decoded in pieces."""
    return b'{"filling":"' + b"x" * 200_000 + b'","value":' + value + b"}"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (
            large(b'{"k":1,' + b",".join(b'"k%d":1' % i for i in range(20_000)) + b',"k":2}'),
            'the key "k" appears twice',
        ),
        (large(b'[{"k":1,"k":2}]'), 'the key "k" appears twice'),
        (large(b'1,"value":2'), 'the key "value" appears twice'),
        (large(b"[" * 64 + b"]" * 64), "deeper"),
        (large(b"[" + b"1," * limits.MAX_JSON_ITEMS + b"1]"), "524288 values"),
        (large(b"[" + b"[]," * limits.MAX_JSON_PARTS + b"1]"), "131072 strings"),
        (large(b"[" + b'"",' * limits.MAX_JSON_PARTS + b"1]"), "131072 strings"),
        (b"[" * 2**21, "131072 strings"),
        (large(b'"\\ud800"'), "surrogate"),
        (large(b'"\xff"'), "UTF-8"),
        (large(b"1e999"), "too large"),
        (large(b"[1,]"), ""),
        (large(b'"no end'), "no end"),
        (large(b"1") + b"x", ""),
        (b" " * 200_000 + b"[1]", "an object"),
    ],
)
def test_large_texts_that_are_not_acceptable(raw: bytes, said: str) -> None:
    with pytest.raises(RequestError, match="not acceptable JSON") as caught:
        parse_json(raw)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_marks_within_strings_are_not_counted() -> None:
    text = ',[{:"\\' * (limits.MAX_JSON_ITEMS // 2)
    assert parse_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_as_many_values_as_allowed() -> None:
    ids = list(range(limits.MAX_JSON_ITEMS - 10))
    assert parse_json(json.dumps({"prompt": ids}).encode()) == {"prompt": ids}


def test_no_piece_is_decoded_that_is_larger_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds the interpreter's lock is bounded, whatever the shape of a text (but for a single string)."""
    sizes: list[int] = []
    decode = msgspec.json.decode

    def counted(raw: bytes) -> object:
        sizes.append(len(raw))
        return decode(raw)

    monkeypatch.setattr(strict_json.msgspec.json, "decode", counted)  # type: ignore[attr-defined]
    numbers = [[[list(range(1000))] * 10, {"a": list(range(20_000)), "b": {str(i): [i] for i in range(10_000)}}]] * 3
    value = {"x": numbers, "y": {str(i): i for i in range(30_000)}}
    raw = json.dumps(value).encode()
    assert parse_json(raw) == value
    assert max(sizes) <= strict_json._PIECE + 2
    assert len(sizes) < 4 * len(raw) / strict_json._PIECE + 100
