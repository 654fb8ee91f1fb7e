"""JSON as bodies may have it: strict, counted before it is built, and never decoded in one long piece.

A decoder in C keeps every other thread waiting until it is done. So a large body is first looked through for the marks
of its structure, which tell how many values it has and how deep it is, and is then decoded piece by piece.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.config import limits
from penstock.config.errors import RequestError, format_value

_PIECE = 32 * 2**10  # bytes that are decoded in one go: a millisecond or two
_CHUNK = 2**20  # bytes that are looked through in one go
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = b" \t\n\r"
_SPACES = re.compile(rb"[ \t\n\r]*+\Z")
_OPEN, _CLOSE = b"[{", b"]}"
_MARKS = np.zeros(256, np.bool_)
_MARKS[list(b"[]{},:")] = True
_MARKS.flags.writeable = False
_Positions = npt.NDArray[np.int64]


def parse_json(raw: bytes) -> dict[str, Any]:
    """The object that a text is; no NaN or Infinity, no number too large for a double, no key twice, no half surrogate.

    Raises:
        RequestError: it is something else, or larger or deeper than the limits.
    """
    value = _small(raw) if len(raw) <= 2 * _PIECE else _Large(raw).value()
    if not isinstance(value, dict):
        raise _malformed(f"it is {format_value(value)}; allowed: an object")
    return value


def _malformed(reason: str) -> RequestError:
    return RequestError(f"The request body is not acceptable JSON: {reason}.", code="invalid_json")


def _too_deep() -> RequestError:
    return _malformed(f"it is nested deeper than {limits.MAX_JSON_DEPTH} levels")


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {format_value(key)} appears twice in one object")
            seen.add(key)
    return result


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_constant, strict=True)


def _small(raw: bytes) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not valid UTF-8") from None
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise _too_deep() from None
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except ValueError as error:
        long_number = "digits" in str(error)
        raise _malformed("a number has too many digits" if long_number else str(error)[:100]) from None
    if text.count("[") + text.count("{") > limits.MAX_JSON_DEPTH or "\\u" in text:
        _check_tree(value)
    return value


def _check_tree(root: object) -> None:
    """Depth and surrogates, level by level, without recursion."""
    level: list[object] = [root]
    for _ in range(limits.MAX_JSON_DEPTH + 1):
        inner: list[object] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.keys()
                inner += item.values()
            elif isinstance(item, list):
                inner += item
            elif isinstance(item, str) and _SURROGATE.search(item):
                raise _malformed("it contains half of a surrogate pair")
        if not inner:
            return
        level = inner
    raise _too_deep()


@dataclass(frozen=True, slots=True)
class _Structure:
    """The marks of a text outside its strings: where they are, which, and how deep in containers.

    An opening mark counts as within its container, and so does the closing one.
    """

    at: _Positions
    mark: npt.NDArray[np.uint8]
    depth: _Positions


def _structure(raw: bytes) -> _Structure:
    """Looks a text through.

    Raises:
        RequestError: there are more values than allowed, it is too deep, or a string has no end.
    """
    quotes = _quotes(raw)
    if len(quotes) % 2:
        raise _malformed("a string has no end")
    starts, ends = np.append(0, quotes[1::2] + 1), np.append(quotes[::2], len(raw))
    outside = np.frombuffer(b"".join([raw[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]), np.uint8)
    found = [np.zeros(0, np.int64)]
    values = 0
    for start in range(0, len(outside), _CHUNK):
        found.append(np.flatnonzero(_MARKS[outside[start : start + _CHUNK]]) + start)
        values += len(found[-1])
        if values > 4 * limits.MAX_JSON_ITEMS:  # a list in an object has the marks , : [ and ]
            raise _malformed(f"it has more than {limits.MAX_JSON_ITEMS} values")
    inside = np.concatenate(found)
    mark = outside[inside]
    opens, closes = (mark == 91) | (mark == 123), (mark == 93) | (mark == 125)
    if np.count_nonzero(mark == 44) >= limits.MAX_JSON_ITEMS:
        raise _malformed(f"it has more than {limits.MAX_JSON_ITEMS} values")
    if len(quotes) // 2 + np.count_nonzero(opens) > limits.MAX_JSON_PARTS:
        raise _malformed(f"it has more than {limits.MAX_JSON_PARTS} strings, lists and objects")
    level = np.cumsum(opens.astype(np.int64) - closes)
    depth = level + closes
    if len(depth) and depth.max() > limits.MAX_JSON_DEPTH:
        raise _too_deep()
    before = np.cumsum(ends - starts)  # bytes outside of strings, up to the end of each stretch
    part = np.searchsorted(before, inside, side="right")
    return _Structure(inside - (before - ends)[part], mark, depth)


def _quotes(raw: bytes) -> _Positions:
    """Where strings begin and end: the quotes no backslash makes a part of one."""
    found = [np.zeros(0, np.int64)]
    count, escaped = 0, False
    for start in range(0, len(raw), _CHUNK):
        chunk = raw[start : start + _CHUNK]
        chunk = b"x" + chunk[1:] if escaped else chunk
        if b"\\" in chunk:
            chunk = chunk.replace(rb"\\", b"xx").replace(rb"\"", b"xx")
        escaped = chunk.endswith(b"\\")
        found.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == 34) + start)
        count += len(found[-1])
        if count > 2 * limits.MAX_JSON_PARTS:
            raise _malformed(f"it has more than {limits.MAX_JSON_PARTS} strings, lists and objects")
    return np.concatenate(found)


class _Large:
    """A text that is decoded piece by piece."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._marks = _structure(raw)

    def value(self) -> Any:
        return self._value(0, len(self._raw))

    def _value(self, start: int, end: int) -> Any:
        at = self._marks.at
        mark = self._marks.mark
        depth = self._marks.depth
        first, last = np.searchsorted(at, (start, end)).tolist()
        if end - start <= _PIECE or first == last:
            return self._decoded(b"", start, end, b"")
        opening, closing = int(mark[first]), int(mark[last - 1])
        begin, stop = int(at[first]), int(at[last - 1])
        around = self._raw[start:begin].strip(_SPACE) + self._raw[stop + 1 : end].strip(_SPACE)
        if opening not in _OPEN or closing != _CLOSE[_OPEN.index(opening)] or depth[first] != depth[last - 1] or around:
            raise _malformed(f"what begins at byte {start} is no value")
        between = slice(first + 1, last - 1)
        commas = at[between][(depth[between] == depth[first]) & (mark[between] == 44)]
        pieces = self._pieces(begin + 1, stop, commas)
        return self._list(pieces) if opening == 91 else self._dict(pieces, int(depth[first]))

    def _pieces(self, start: int, end: int, commas: _Positions) -> Iterator[tuple[int, int]]:
        """Ranges between commas, of as many elements as make up a piece, or of one that is larger."""
        cuts = np.append(commas, end)
        while start <= end:
            index = max(0, int(np.searchsorted(cuts, start + _PIECE, side="right")) - 1)
            stop = int(cuts[index]) if cuts[index] >= start else int(cuts[np.searchsorted(cuts, start)])
            if len(cuts) > 1 and _SPACES.match(self._raw, start, stop):
                raise _malformed(f"a value is missing at byte {start}")
            yield start, stop
            start = stop + 1

    def _list(self, pieces: Iterator[tuple[int, int]]) -> list[Any]:
        result: list[Any] = []
        for start, end in pieces:
            if end - start <= _PIECE:
                result += self._decoded(b"[", start, end, b"]")
            else:
                result.append(self._value(start, end))
        return result

    def _dict(self, pieces: Iterator[tuple[int, int]], depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for start, end in pieces:
            if end - start <= _PIECE:
                some = self._decoded(b"{", start, end, b"}")
            else:
                colon = self._colon(start, end, depth)
                some = {self._key(start, colon): self._value(colon + 1, end)}
            count = len(result) + len(some)
            repeated = next(filter(result.__contains__, some), None)
            result |= some
            if len(result) != count:
                raise _malformed(f"the key {format_value(repeated)} appears twice in one object")
        return result

    def _colon(self, start: int, end: int, depth: int) -> int:
        at, marks = self._marks.at, self._marks
        first = int(np.searchsorted(at, start))
        if first == len(at) or at[first] >= end or marks.mark[first] != 58 or marks.depth[first] != depth:
            raise _malformed(f"what begins at byte {start} is no key with its value")
        return int(at[first])

    def _key(self, start: int, end: int) -> str:
        key = self._decoded(b"", start, end, b"")
        if not isinstance(key, str):
            raise _malformed(f"what begins at byte {start} is no key with its value")
        return key

    def _decoded(self, head: bytes, start: int, end: int, tail: bytes) -> Any:
        if (plain := self._plain(start, end)) is not None:
            return plain
        raw = self._raw[start:end]
        raw = b"%b%b%b" % (head, raw, tail) if head else raw
        try:
            value = msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._refused(raw, start, error) from None
        first, last = np.searchsorted(self._marks.at, (start, end)).tolist()
        if np.count_nonzero(self._marks.mark[first:last] == 58) != _members(value):
            raise self._refused(raw, start, ValueError("a key appears twice in one object"))
        return value

    def _plain(self, start: int, end: int) -> str | None:
        """The string that a long stretch is, if nothing in it is escaped: a fifth of the time that a decoder takes."""
        if end - start <= _PIECE:
            return None
        begin, stop = self._raw.find(b'"', start, end), self._raw.rfind(b'"', start, end)
        around = self._raw[start : max(begin, start)] + self._raw[stop + 1 : end]
        if begin >= stop or around.strip(_SPACE):
            return None
        inside = memoryview(self._raw)[begin + 1 : stop]
        for at in range(0, len(inside), _CHUNK):
            chunk = np.frombuffer(inside[at : at + _CHUNK], np.uint8)
            if chunk.min() < 32 or bool(np.any((chunk == 34) | (chunk == 92))):
                return None
        try:
            return str(inside, "utf-8")
        except UnicodeDecodeError:
            return None

    def _refused(self, raw: bytes, start: int, error: Exception) -> RequestError:
        """What is wrong with a piece: in the words for small texts, if it is one."""
        if len(raw) <= 2 * _PIECE:
            try:
                _small(raw)
            except RequestError as told:
                reason = str(told).partition(": ")[2].removesuffix(".")
                return told if "appears twice" in reason else _malformed(f"{reason}, counted from byte {start}")
        return _malformed(f"a value that begins at byte {start} is none: {str(error)[:60]}")


def _members(root: object) -> int:
    """How many members all objects of a tree have."""
    count, level = 0, [root]
    while level:
        inner: list[object] = []
        for item in level:
            if type(item) is dict:
                count += len(item)
                inner += [value for value in item.values() if type(value) in (dict, list)]
            elif type(item) is list:
                inner += [value for value in item if type(value) in (dict, list)]
        level = inner
    return count
