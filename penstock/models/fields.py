"""Checked reading of config.json: a missing, mistyped or impossible field is an error that names it."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from penstock.config.errors import CheckpointError

T = TypeVar("T")
REQUIRED: Any = object()
_MOST = 1 << 40  # of any size or count: products of some of them have to be numbers of 64 bits


class Fields:
    """One level of a model's configuration. A field that is absent or null takes the default, if there is one."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def error(self, name: str, problem: str) -> CheckpointError:
        """The error to raise about a field."""
        return CheckpointError(
            f"{self.where}: {name} {problem}. Correct the file or download it again from where the model comes from."
        )

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: Any = REQUIRED, *, minimum: int = 1, most: int = _MOST) -> int:
        """An integer from `minimum` to `most`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"is {_shown(value)}; allowed: an integer of at least {minimum}")
        if value > most:
            raise self.error(name, f"is {_shown(value)}; allowed: at most {most}")
        return value

    def number(self, name: str, default: Any = REQUIRED, *, minimum: float = 0.0) -> float:
        """A finite number above `minimum`."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(name, f"is {_shown(value)}; allowed: a finite number")
        if value <= minimum:
            raise self.error(name, f"is {value}; allowed: above {minimum}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"is {_shown(value)}; allowed: true, false")
        return value

    def choice(self, name: str, allowed: Mapping[str, T], default: str) -> T:
        """The value `allowed` gives for the field's text."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in allowed:
            near = f"; nearest: {_nearest(value[:80], allowed, 0.0)}" if isinstance(value, str) else ""
            raise self.error(name, f"is {_shown(value)}; allowed: {', '.join(sorted(allowed))}{near}")
        return allowed[value]

    def texts(self, name: str, count: int) -> tuple[str, ...]:
        """A list of `count` strings."""
        value = self._get(name, REQUIRED)
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise self.error(name, f"is {_shown(value)}; allowed: a list of strings")
        if len(value) != count:
            raise self.error(name, f"has {len(value)} entries where num_hidden_layers is {count}")
        return tuple(value)

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers, empty where absent."""
        value = self._get(name, ())
        if not isinstance(value, (list, tuple)) or not all(type(item) is int for item in value):
            raise self.error(name, f"is {_shown(value)}; allowed: a list of integers")
        return tuple(value)

    def numbers(self, name: str, count: int, what: str = "one a rotated pair") -> tuple[float, ...]:
        """A list of `count` numbers above 0; `what` they are."""
        value = self._get(name, REQUIRED)
        if not isinstance(value, (list, tuple)) or not all(type(item) in (int, float) and item > 0 for item in value):
            raise self.error(name, f"is {_shown(value)}; allowed: a list of numbers above 0")
        if len(value) != count:
            raise self.error(name, f"has {len(value)} entries; allowed: {count}, {what}")
        return tuple(map(float, value))

    def shares(self, name: str, count: int, default: Iterable[float]) -> tuple[float, ...]:
        """A list of `count` numbers from 0 up to, but not, 1; or one for all."""
        value = self._get(name, list(default))
        value = [value] * count if type(value) in (int, float) else value
        if not isinstance(value, (list, tuple)) or not all(type(x) in (int, float) and 0 <= x < 1 for x in value):
            raise self.error(name, f"is {_shown(value)}; allowed: a list of numbers from 0 up to, but not, 1")
        if len(value) != count:
            raise self.error(name, f"has {len(value)} entries where num_hidden_layers is {count}")
        return tuple(map(float, value))

    def below(self, name: str) -> Fields | None:
        """The object under a field, None where absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, f"is {_shown(value)}; allowed: an object")
        return Fields(value, f"{self.where}: {name}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            near = _nearest(name, self.values, 0.8)
            raise self.error(
                name, "is missing" + (f", though there is {near}, {_shown(self.values[near])}" if near else "")
            )
        return default


def _nearest(name: str, names: Iterable[str], cutoff: float) -> str | None:
    """The most similar of some names; None if none is as similar as `cutoff`, of 1."""
    return next(iter(difflib.get_close_matches(name, list(names), 1, cutoff)), None)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
