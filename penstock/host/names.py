"""From the name in a call to one of the host's models: aliases, names that models share, the nearest of a wrong one."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence

from penstock.config.errors import ConfigError, ModelNotFoundError, ParameterError, RequestError, format_value
from penstock.host.source import ModelSource

_COMPARED_NAMES, _COMPARED_CHARS = 256, 64  # of names that are looked at for one that was meant
_SHOWN = 5


class Names:
    """The names of models at one time."""

    def __init__(self, sources: Mapping[str, ModelSource]) -> None:
        """Raises ConfigError where a name is one model's and another's alias."""
        self.sources = sources
        self._shared: dict[str, list[tuple[str, float]]] = {}
        for source in sources.values():
            for alias, weight in source.aliases:
                if alias in sources:
                    raise ConfigError(f"the alias {alias!r} of {source.name!r} is a model's name; choose another.")
                self._shared.setdefault(alias, []).append((source.name, weight))

    @property
    def all(self) -> Sequence[str]:
        """Every name that a call may use, those of models first."""
        return (*self.sources, *self._shared)

    @property
    def has_remotes(self) -> bool:
        """Whether any model is served elsewhere."""
        return any(source.remote is not None for source in self.sources.values())

    def __contains__(self, name: str) -> bool:
        return name in self.sources or name in self._shared

    def model(self, name: str | None, draw: str = "") -> ModelSource:
        """The model that is meant; of several that share the name, the one that falls to `draw`, a call's own id.

        Raises:
            ModelNotFoundError: there is none; the message names the nearest.
            RequestError: no name is given and there are several.
        """
        if name is None:
            if len(self.sources) == 1:
                return next(iter(self.sources.values()))
            raise RequestError(f"model is required; {self._listed()}.", param="model", code="model_required")
        if name in self.sources:
            return self.sources[name]
        if name in self._shared:
            return self.sources[_drawn(self._shared[name], draw)]
        raise self.unknown(name)

    def own(self, name: str) -> str | None:
        """The own name of the model that a name stands for: "" where several share it, None where it is none."""
        if name in self.sources:
            return name
        shared = self._shared.get(name)
        return None if shared is None else shared[0][0] if len(shared) == 1 else ""

    def base(self, name: str | None) -> str:
        """The own name of the model that an adapter belongs to; None for the one model there is.

        Raises:
            RequestError: it is none of the models that are loaded here, or not clear which.
        """
        loaded = {own: source for own, source in self.sources.items() if source.remote is None}
        if name is not None and name not in self:
            raise self.unknown(name)
        found = [own for own, source in loaded.items() if name in (None, own, *(alias for alias, _ in source.aliases))]
        if len(found) == 1:
            return found[0]
        some = ", ".join(map(format_value, list(loaded)[:_SHOWN])) + (", ..." if len(loaded) > _SHOWN else "")
        raise ParameterError("base_model_name", name, f"the name of the model that the adapter belongs to ({some})")

    def unknown(self, name: str) -> ModelNotFoundError:
        """What a caller is told of a name that is none of them."""
        near = self.nearest(name)
        told = f"did you mean {', '.join(map(format_value, near))}?" if near else f"{self._listed()}."
        message = f"The model {format_value(name)} is not served here; {told} GET /v1/models lists all."
        return ModelNotFoundError(message, param="model", code="model_not_found")

    def nearest(self, name: str) -> Sequence[str]:
        """Names that are written much like this one, the nearest first."""
        some = self.all[:_COMPARED_NAMES]
        short = {known[:_COMPARED_CHARS].lower(): known for known in reversed(some)}
        found = difflib.get_close_matches(name[:_COMPARED_CHARS].lower(), short, 3, 0.5)
        return [short[known] for known in found]

    def _listed(self) -> str:
        some = ", ".join(map(format_value, self.all[:_SHOWN]))
        more = ", ..." if len(self.all) > _SHOWN else ""
        return f"available: {some}{more}" if some else "no model is there yet"


def _drawn(shared: Sequence[tuple[str, float]], draw: str) -> str:
    """One of the names, as often as its weight says."""
    number = int.from_bytes(hashlib.blake2b(draw.encode(), digest_size=8).digest(), "little") / 2**64
    left = number * sum(weight for _, weight in shared)
    for name, weight in shared:
        left -= weight
        if left < 0:
            return name
    return shared[-1][0]
