"""Which low-rank adapters a request's tokens have. Named by content; what a slot holds is the engine's.

An activated adapter (aLoRA, arXiv:2504.12397) counts from its last invocation in a prompt on: what comes before is as
without it, and is found again as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from penstock.config.errors import ConfigError

MOST_ADAPTERS: Final = 4  # of one token, whoever computes; `AdapterArgs::most` in csrc/ops/model_ops.h

MOST_INVOCATION: Final = 256  # tokens of an invocation
_KEY_BITS: Final = 1024  # those of a token, or of a place in a medium, are fewer

MOST_WEIGHT: Final = 1e30  # of an adapter: what float32 holds, and some more of its product


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """One adapter of a request.

    Attributes:
        digest: names its content.
        path: folder or file it is read from.
        weight: how much of it counts, 1 for all.
        invocation: the tokens that an activated adapter waits for; () for one that counts from the first token on.
        first: the token of a request from which it counts.
        pinned: it stays in memory once it was read, as far as there is room beside others.
        name: what clients call it, "" where that is not known.
    """

    digest: str
    path: str
    weight: float = 1.0
    invocation: tuple[int, ...] = ()
    first: int = 0
    pinned: bool = False
    name: str = ""


def adapters_key(adapters: Iterable[AdapterUse]) -> str:
    """What names the content of these adapters together, "" for none: prefixes are told apart by it."""
    return "+".join(f"{adapter.digest}*{adapter.weight!r}" for adapter in adapters)


def activated(adapters: tuple[AdapterUse, ...], prompt_ids: Sequence[int]) -> tuple[AdapterUse, ...]:
    """What a prompt's tokens have of these adapters: activated ones from their invocation on, or not at all."""
    if not any(use.invocation for use in adapters):
        return adapters
    backwards = "".join(map(chr, reversed(prompt_ids)))  # a search from the end is linear only forwards
    found = []
    for use in adapters:
        place = backwards.find("".join(map(chr, reversed(use.invocation))))
        if place >= 0:
            first = len(prompt_ids) - place - len(use.invocation) if use.invocation else 0
            found.append(replace(use, first=first))
    return tuple(found)


def key_tags(adapters: Sequence[AdapterUse], end: int) -> Iterator[tuple[int, int, int]]:
    """How activated adapters tell the prefix keys of `end` tokens apart: (first, end, what is added to each key)."""
    begins = sorted({use.first for use in adapters if use.invocation})
    for first, after in pairwise([*begins, end]):
        active = adapters_key(use for use in adapters if use.invocation and use.first <= first)
        yield first, after, int.from_bytes(b"\x02" + active.encode(), "big") << _KEY_BITS


def key_parts(key: int) -> tuple[str, int]:
    """What names the activated adapters of a prefix key, "" for none, and the key without them."""
    tag, key = key >> _KEY_BITS, key & (1 << _KEY_BITS) - 1
    return tag.to_bytes((tag.bit_length() + 7) // 8, "big")[1:].decode(), key


def path_and_scale(flag: str, text: str) -> tuple[str, float]:
    """Path, with the home folder for ~, and scale of `path` or `path:scale`; 1 where none is given.

    Raises:
        ConfigError: the scale is no finite number.
    """
    path, found, scale = text.rpartition(":")
    try:
        counts = float(scale) if found else 1.0
    except ValueError:
        path, counts = text, 1.0
    if not abs(counts) <= MOST_WEIGHT:
        raise ConfigError(f"{flag} is {text!r}; allowed: path, or path:scale with a finite number.")
    return str(Path(path if found and path else text).expanduser()), counts
