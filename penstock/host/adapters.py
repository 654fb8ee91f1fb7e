"""The adapters of a server's model by their names: which files each stands for, and how much of it counts unasked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config.adapters import MOST_ADAPTERS, MOST_WEIGHT, AdapterUse, path_and_scale
from penstock.config.errors import CheckpointError, ConfigError, ParameterError, RequestError, format_value
from penstock.library.adapters import adapter_path
from penstock.weights.adapters.open import read_adapter

MOST_NAMES = 10_000
MOST_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that requests may name.

    Attributes:
        name: as a model's.
        number: by which llama-server's clients name it, in order of coming.
        use: its content.
        rank: the largest of its ranks.
        scale: how much of it counts in answers of the model itself.
    """

    name: str
    number: int
    use: AdapterUse
    rank: int
    scale: float = 0.0


class AdapterNames:
    """All of them. Belongs to the event loop of its server."""

    def __init__(self, modules: Sequence[str] = (), always: Sequence[str] = (), taken: Iterable[str] = ()) -> None:
        """`modules` as `--lora-modules` has them, `always` as `--lora`; names of models are `taken`.

        Raises:
            ConfigError: one is not written so, or has no adapter there.
        """
        self._taken = frozenset(taken)
        self._named: dict[str, NamedAdapter] = {}
        self._numbers = 0
        known: dict[str, tuple[AdapterUse, int]] = {}
        asked = [("--lora-modules", module, _module(module)) for module in modules]
        asked += [("--lora", given, _always(given)) for given in always]
        for flag, given, (name, path, scale, pinned) in asked:
            try:
                known[path] = known.get(path) or self.read(path)
                use, rank = known[path]
                self._named[name] = replace(self.add(name, replace(use, pinned=pinned), rank), scale=scale)
            except (CheckpointError, RequestError) as error:
                raise ConfigError(f"{flag} {given}: {error}") from None
        if len(self.unasked()) > MOST_ADAPTERS:
            raise ConfigError(f"--lora names {len(self.unasked())} adapters; at most {MOST_ADAPTERS} count together.")

    @staticmethod
    def read(path: str) -> tuple[AdapterUse, int]:
        """As weights.adapters.open.read_adapter, of a path or what was pulled: not for an event loop."""
        return read_adapter(adapter_path(path))

    def __len__(self) -> int:
        return len(self._named)

    def all(self) -> Sequence[NamedAdapter]:
        """Every adapter, in order of coming."""
        return tuple(self._named.values())

    def find(self, name: str) -> NamedAdapter | None:
        """The adapter of that name."""
        return self._named.get(name)

    def add(self, name: str, use: AdapterUse, rank: int, *, again: bool = False) -> NamedAdapter:
        """Gives an adapter that was read a name; `again`: in the place of one that has it.

        Raises:
            RequestError: the name is taken, or cannot be one.
        """
        self.check(name, again=again)
        before = self._named.get(name)
        number = self._numbers if before is None else before.number
        self._numbers += before is None
        added = self._named[name] = NamedAdapter(name, number, use, rank)
        return added

    def check(self, name: str, *, again: bool = False) -> None:
        """Raises RequestError where a name cannot be given."""
        if not 0 < len(name) <= MOST_NAME_CHARS or not name.isprintable():
            raise ParameterError("lora_name", name, f"1 to {MOST_NAME_CHARS} printable characters")
        if name in self._taken or (name in self._named and not again):
            told = "send load_inplace: true to take its place" if name in self._named else "it is the model's"
            message = f"The name {format_value(name)} is in use; {told}."
            raise RequestError(message, param="lora_name", code="name_taken")
        if len(self._named) >= MOST_NAMES:
            raise RequestError(f"There are {MOST_NAMES} adapters; unload some.", param="lora_name", code="too_many")

    @property
    def numbers(self) -> int:
        """How many adapters have come."""
        return self._numbers

    def known(self) -> dict[str, Any]:
        """All of them in plain values, as `take_over` takes them."""
        return {"numbers": self._numbers, "adapters": [asdict(one) for one in self._named.values()]}

    def take_over(self, known: Mapping[str, Any]) -> None:
        """Has what another process of this server knows."""
        self._numbers = known["numbers"]
        for told in known["adapters"]:
            self._named[told["name"]] = NamedAdapter(**{**told, "use": use_of(told["use"])})

    def remove(self, name: str) -> bool:
        """Forgets a name; what runs goes on. Whether there was one."""
        return self._named.pop(name, None) is not None

    def unasked(self) -> tuple[AdapterUse, ...]:
        """What answers of the model itself are made with."""
        return tuple(replace(one.use, weight=one.scale) for one in self._named.values() if one.scale)

    def weighted(self, scales: Iterable[tuple[int, float]], param: str) -> tuple[AdapterUse, ...]:
        """Adapters by their numbers, with these weights; those at 0 are left out.

        Raises:
            ParameterError: a number or weight is none, or there are too many.
        """
        by_number = {one.number: one for one in self._named.values()}
        chosen: dict[int, AdapterUse] = {}
        for number, scale in scales:
            if number not in by_number:
                known = ", ".join(map(str, list(by_number)[:20])) or "there are none"
                raise ParameterError(param, {"id": number}, f"the id of an adapter ({known})")
            if not abs(scale) <= MOST_WEIGHT:
                raise ParameterError(param, {"scale": scale}, f"a number of at most {MOST_WEIGHT:g}")
            chosen[number] = replace(by_number[number].use, weight=scale)
        found = tuple(use for use in chosen.values() if use.weight)
        if len(found) > MOST_ADAPTERS:
            raise ParameterError(param, f"{len(found)} adapters", f"at most {MOST_ADAPTERS} that count")
        return found

    def scale(self, scales: Iterable[tuple[int, float]], param: str) -> None:
        """Sets how much adapters count unasked; those that are not named count nothing. Raises as `weighted`."""
        given = list(scales)
        self.weighted(given, param)
        wanted = dict(given)
        self._named = {name: replace(one, scale=wanted.get(one.number, 0.0)) for name, one in self._named.items()}


def use_of(told: Mapping[str, Any]) -> AdapterUse:
    """An adapter of the plain values that `dataclasses.asdict` makes of it, and JSON of those."""
    return AdapterUse(**{**told, "invocation": tuple(told["invocation"])})


class _Asked(NamedTuple):
    """An adapter of the command line: its name and path, how much of it counts unasked, whether it is pinned."""

    name: str
    path: str
    scale: float = 0.0
    pinned: bool = False


def _module(text: str) -> _Asked:
    """`name=path`, or vLLM's and SGLang's JSON."""
    given: Any = None
    if text.startswith("{"):
        with suppress(ValueError, RecursionError):
            given = json.loads(text)
    else:
        name, found, path = text.partition("=")
        given = {"name": name, "path": path} if found else None
    given = given if isinstance(given, dict) else {}
    name, path = given.get("name"), given.get("path")
    pinned = given.get("pinned", False)
    if not (isinstance(name, str) and isinstance(path, str) and name and path and isinstance(pinned, bool)):
        allowed = '{"name": …, "path": …, "pinned": false}'
        raise ConfigError(f"--lora-modules is {text!r}; allowed: name=path, or {allowed}.")
    return _Asked(name, str(Path(path).expanduser()), pinned=pinned)


def _always(text: str) -> _Asked:
    """`path` or `path:scale`."""
    path, counts = path_and_scale("--lora", text)
    return _Asked(Path(path).stem, path, counts)
