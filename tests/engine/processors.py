"""Logits processors that tests register."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
SHARE = 2654435761


def bias(prompt_ids: Sequence[int], generated_ids: Sequence[int], row: Row, biases: Mapping[str, float]) -> None:
    """What logit_bias does."""
    for token, value in biases.items():
        row[int(token)] = np.float32(np.float64(row[int(token)]) + value)


def history(prompt_ids: Sequence[int], generated_ids: Sequence[int], row: Row, strength: float = 3.0) -> Row:
    """A row that depends on every token before it, and on their order; another array than the one it was given."""
    state = len(prompt_ids)
    for token in (*prompt_ids, *generated_ids):
        state = (state * SHARE + token + 1) % 2**32
    shifts = (np.arange(len(row), dtype=np.uint64) * SHARE + state) % 1024
    return row + (shifts.astype(np.float32) / 1024 * strength).astype(np.float32)


class Odd:
    """Allows tokens whose numbers leave the rest that the last one tells."""

    def __init__(self, of: int = 2) -> None:
        if of < 1:
            raise ValueError(f"of is {of}")
        self._of = of

    def __call__(self, prompt_ids: Sequence[int], generated_ids: Sequence[int], row: Row) -> None:
        last = (*prompt_ids, *generated_ids)[-1]
        row[np.arange(len(row)) % self._of != (last + 1) % self._of] = -np.inf


def failing(prompt_ids: Sequence[int], generated_ids: Sequence[int], row: Row, after: int = 0) -> Any:
    """Raises behind so many tokens."""
    if len(generated_ids) >= after:
        raise RuntimeError("at /srv/secret.py")


def wrong(prompt_ids: Sequence[int], generated_ids: Sequence[int], row: Row, kind: str) -> Any:
    """Gives what is no row of logits."""
    if kind == "short":
        return row[1:]
    if kind == "text":
        return "x"
    row[3] = {"nan": np.nan, "inf": np.inf}[kind]
    return None


NAMES = ("bias", "history", "Odd", "failing", "wrong")
ALL = tuple(f"{__name__}:{name}" for name in NAMES)
