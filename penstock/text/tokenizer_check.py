"""What in a tokenizer's file would make the tokenizers library panic, which prints on standard error, or abort.

Checked before the library sees it: a panic in Rust can be caught, but neither its output nor an abort can.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.text.json_tree import objects

_MOST_UNITS: Final = 2**22  # of a character map; SentencePiece's own have some 60,000
_PARTS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_OUTSIDE: Final = "its character map leads out of its table"
_HAS_LEAF: Final = 8
_LABEL: Final = 0x8000_00FF
_VALUE: Final = 0x7FFF_FFFF


def read_document(data: bytes) -> dict[str, Any]:
    """A tokenizer.json that names nothing twice, so that everyone who reads it reads the same.

    Raises:
        ValueError: it is no such file.
    """
    try:
        document = json.loads(data, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs) and not all(type(value) is int for value in found.values()):  # but in a vocabulary
        raise ValueError("it has an object with a repeated name")
    return found


def check_document(document: Mapping[str, Any]) -> None:
    """Raises ValueError where the library would fail on a tokenizer.json instead of refusing it."""
    try:
        _check_merges(document.get("model"))
        for part in _PARTS:
            for found in objects(document.get(part)):
                _check_part(part, found)
    except (TypeError, IndexError) as error:
        raise ValueError(f"a part of it has the wrong form ({error})") from None


def _check_merges(model: Any) -> None:
    """The library cuts the prefix of continuing subwords off the second half of a merge, whatever that is."""
    merges = model.get("merges") if isinstance(model, dict) else None
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    if not (isinstance(prefix, str) and prefix and isinstance(merges, list)):
        return
    for merge in merges:
        second = merge.partition(" ")[2] if isinstance(merge, str) else merge[1] if isinstance(merge, list) else ""
        if not str(second).startswith(prefix):
            raise ValueError(f"the merge {merge!r:.80} does not go on with continuing_subword_prefix, {prefix!r:.40}")


def _check_part(part: str, found: Mapping[str, Any]) -> None:
    if found.get("type") == "Precompiled" or "precompiled_charsmap" in found:
        try:
            data = base64.b64decode(found.get("precompiled_charsmap", 0), validate=True)
        except (ValueError, TypeError):
            raise ValueError(f"{part}.precompiled_charsmap is no base64") from None
        check_charsmap(data)
    if found.get("length") == 0:
        raise ValueError(f"{part}.length is 0; allowed: at least 1")
    if "single" in found or "pair" in found:
        _check_template(part, found)


def _check_template(part: str, found: Mapping[str, Any]) -> None:
    special = found.get("special_tokens")
    for name, allowed in (("single", ("A",)), ("pair", ("A", "B"))):
        for piece in found.get(name) or ():
            token = piece.get("SpecialToken") if isinstance(piece, dict) else None
            if isinstance(token, dict) and not (isinstance(special, dict) and token.get("id") in special):
                raise ValueError(f"{part}.{name} has the token {token.get('id')!r:.80}, which special_tokens lacks")
            sequence = piece.get("Sequence") if isinstance(piece, dict) else None
            if isinstance(sequence, dict) and sequence.get("id") not in allowed:
                raise ValueError(
                    f"{part}.{name} has the text {sequence.get('id')!r:.80}; allowed: {', '.join(allowed)}"
                )


def check_charsmap(data: bytes) -> None:
    """Raises ValueError unless every walk through SentencePiece's compiled character map stays inside.

    The map is a double array (darts-clone, as in SentencePiece's normalizer.cc) in front of the texts that its values
    point to.
    """
    head = int.from_bytes(data[:4], "little")
    if not 4 <= head <= len(data) - 4 or head % 4 or head > 4 * _MOST_UNITS:
        raise ValueError(f"its character map's table is said to have {head} bytes of {len(data)}")
    units = np.frombuffer(data, "<u4", head // 4, 4).astype(np.int64)
    texts = data[4 + head :]
    try:
        texts.decode()
    except UnicodeDecodeError:
        raise ValueError("its character map's texts are no UTF-8") from None
    starts = np.append(np.frombuffer(texts, np.uint8) & 0xC0 != 0x80, True)
    seen = np.zeros(len(units), bool)
    level = _offsets(units[:1])
    while len(level := np.unique(level)):
        if level[-1] | 0xFF >= len(units):
            raise ValueError(_OUTSIDE)
        level = level[~seen[level]]
        seen[level] = True
        level = _next(units, level, starts)


def _offsets(units: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return (units >> 10) << ((units & (1 << 9)) >> 6)


def _next(
    units: npt.NDArray[np.int64], level: npt.NDArray[np.int64], starts: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Where any byte leads from these places, all within the table."""
    following: list[npt.NDArray[np.int64]] = []
    for byte in range(1, 256):
        places = level ^ byte
        places = places[units[places] & _LABEL == byte]
        after = places ^ _offsets(units[places])
        if len(after) and after.max() >= len(units):
            raise ValueError(_OUTSIDE)
        values = units[after[(units[places] >> _HAS_LEAF) & 1 == 1]] & _VALUE
        if len(values) and (values.max() >= len(starts) or not starts[values].all()):
            raise ValueError("its character map points at no text")
        following.append(after)
    return np.concatenate(following)
