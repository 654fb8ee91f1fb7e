"""The adapters of a server's models by their names: whose each is, its files, and how much of it counts unasked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config.adapters import MOST_ADAPTERS, MOST_WEIGHT, AdapterUse, path_and_scale
from penstock.config.errors import CheckpointError, ConfigError, ParameterError, RequestError, format_value
from penstock.host.names import Names
from penstock.host.source import ModelSource, Sources
from penstock.library.adapters import adapter_path
from penstock.weights.adapters.open import read_adapter

MOST_NAMES = 10_000
MOST_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that requests may name.

    Attributes:
        name: as a model's.
        base: the name of the model that it belongs to.
        number: by which llama-server's clients name it, in order of coming.
        use: its content.
        rank: the largest of its ranks.
        scale: how much of it counts in answers of the model itself.
    """

    name: str
    base: str
    number: int
    use: AdapterUse
    rank: int
    scale: float = 0.0


def _free(name: str) -> bool:
    return False


class AdapterNames:
    """All of them. Belongs to the event loop of its server."""

    def __init__(
        self,
        modules: Sequence[str] = (),
        always: Sequence[str] = (),
        taken: Callable[[str], bool] = _free,
        base: str | None = None,
    ) -> None:
        """What there is from the start.

        Args:
            modules, always: as `--lora-modules` and `--lora` have them.
            taken: whether a name is a model's.
            base: the model that all belong to; None for the one that each says.

        Raises:
            ConfigError: one is not written so, or has no adapter there.
        """
        self._taken = taken
        self._named: dict[str, NamedAdapter] = {}
        self._numbers = 0
        known: dict[str, tuple[AdapterUse, int]] = {}
        asked = [("--lora-modules", module, _module(module)) for module in modules]
        asked += [("--lora", given, _always(given)) for given in always]
        for flag, given, one in asked:
            try:
                known[one.path] = known.get(one.path) or self.read(one.path)
                use, rank = known[one.path]
                added = self.add(one.name, replace(use, pinned=one.pinned), rank, base or one.base or "")
                self._named[one.name] = replace(added, scale=one.scale)
            except (CheckpointError, RequestError) as error:
                raise ConfigError(f"{flag} {given}: {error}") from None
        if len(always) > MOST_ADAPTERS:
            raise ConfigError(f"--lora names {len(always)} adapters; at most {MOST_ADAPTERS} count together.")

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

    def meant(self, name: str | None, model_of: Callable[[str], str | None]) -> NamedAdapter | None:
        """The adapter that a request names as its model: by its name or, as SGLang's clients write it, MODEL:NAME.

        `model_of` gives the own name of the model that a name stands for, None where it is none.
        """
        if name is None or model_of(name) is not None:
            return None
        model, _, own = name.rpartition(":")
        behind = self._named.get(own)
        if behind is not None and model_of(model) != behind.base:
            behind = None
        return self._named.get(name) or behind

    def add(self, name: str, use: AdapterUse, rank: int, base: str = "", *, again: bool = False) -> NamedAdapter:
        """Gives an adapter of the model `base` that was read a name; `again`: in the place of one that has it.

        Raises:
            RequestError: the name is taken, or cannot be one.
        """
        self.check(name, again=again)
        before = self._named.get(name)
        number = self._numbers if before is None else before.number
        self._numbers += before is None
        added = self._named[name] = NamedAdapter(name, base, number, replace(use, name=name), rank)
        return added

    def check(self, name: str, *, again: bool = False) -> None:
        """Raises RequestError where a name cannot be given."""
        if not 0 < len(name) <= MOST_NAME_CHARS or not name.isprintable():
            raise ParameterError("lora_name", name, f"1 to {MOST_NAME_CHARS} printable characters")
        if self._taken(name) or (name in self._named and not again):
            told = "send load_inplace: true to take its place" if name in self._named else "it is a model's"
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

    def unasked(self, base: str) -> tuple[AdapterUse, ...]:
        """What answers of a model itself are made with."""
        counting = (one for one in self._named.values() if one.scale and one.base == base)
        return tuple(replace(one.use, weight=one.scale) for one in counting)

    def weighted(self, scales: Iterable[tuple[int, float]], param: str, base: str) -> tuple[AdapterUse, ...]:
        """Adapters of a model by their numbers, with these weights; those at 0 are left out.

        Raises:
            ParameterError: a number or weight is none, or there are too many.
        """
        by_number = {one.number: one for one in self._named.values() if one.base == base}
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
        bases = {one.number: one.base for one in self._named.values()}
        unknown = [number for number, _ in given if number not in bases]
        for base in dict.fromkeys(bases.get(number, "") for number, _ in given):
            mine = unknown or [number for number, its in bases.items() if its == base]
            self.weighted([pair for pair in given if pair[0] in mine], param, base)
        wanted = dict(given)
        self._named = {name: replace(one, scale=wanted.get(one.number, 0.0)) for name, one in self._named.items()}


def use_of(told: Mapping[str, Any]) -> AdapterUse:
    """An adapter of the plain values that `dataclasses.asdict` makes of it, and JSON of those."""
    return AdapterUse(**{**told, "invocation": tuple(told["invocation"])})


def pinned(modules: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """Adapters as `--lora-modules` has them, of which those of these names are pinned.

    Raises:
        ConfigError: an adapter is not written so, or there is none of a name.
    """
    asked = [_module(module) for module in modules]
    known = [one.name for one in asked]
    if unknown := [name for name in names if name not in known]:
        told = ", ".join(map(format_value, known[:20])) or "there are none"
        raise ConfigError(f"--lora-pin is {unknown[0]!r}; allowed: the name of an adapter of --lora-modules ({told}).")
    return tuple(_written(one._replace(pinned=one.pinned or one.name in names)) for one in asked)


def of_several(modules: Sequence[str], sources: Sources) -> tuple[tuple[str, ...], Sources]:
    """Adapters of a server of several models, each with its model's own name, and the models, of which those that have
    adapters take some.

    Raises:
        ConfigError: an adapter is not written as `--lora-modules` has it, or belongs to none of these models.
    """
    names = Names(sources())
    told, bases = list[str](), set[str]()
    for module in modules:
        one = _module(module)
        try:
            base = names.base(one.base)
        except RequestError as error:
            raise ConfigError(f"--lora-modules {module}: {error}") from None
        if one.name in names:
            raise ConfigError(f"--lora-modules {module}: the name {format_value(one.name)} is a model's.")
        bases.add(base)
        told.append(_written(one._replace(base=base)))

    def adapted() -> Mapping[str, ModelSource]:
        return {name: _adapted(source) if name in bases else source for name, source in sources().items()}

    return tuple(told), adapted


def _adapted(source: ModelSource) -> ModelSource:
    """A model that takes adapters."""
    return source if source.options is None else replace(source, options=replace(source.options, enable_lora=True))


class _Asked(NamedTuple):
    """An adapter of the command line: its name, path and model, how much of it counts unasked, whether it is pinned."""

    name: str
    path: str
    scale: float = 0.0
    pinned: bool = False
    base: str | None = None


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
    name, path = (given.get(key, given.get(f"lora_{key}")) for key in ("name", "path"))
    pinned, base = given.get("pinned", False), given.get("base_model_name")
    is_right = isinstance(pinned, bool) and (base is None or isinstance(base, str))
    if not (isinstance(name, str) and isinstance(path, str) and name and path and is_right):
        allowed = '{"name": …, "path": …, "base_model_name": …, "pinned": false}'
        raise ConfigError(f"--lora-modules is {text!r}; allowed: name=path, or {allowed}.")
    return _Asked(name, str(Path(path).expanduser()), pinned=pinned, base=base)


def _written(one: _Asked) -> str:
    """What `_module` reads as that."""
    base = {} if one.base is None else {"base_model_name": one.base}
    return json.dumps({"name": one.name, "path": one.path, "pinned": one.pinned, **base})


def _always(text: str) -> _Asked:
    """`path` or `path:scale`."""
    path, counts = path_and_scale("--lora", text)
    return _Asked(Path(path).stem, path, counts)
