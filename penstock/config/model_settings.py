"""Settings of a model's own files that an operator gives other values: its configuration, and how it pools.

Both are kept in options as JSON, so that options stay plain values.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from penstock.config.errors import ConfigError, format_value
from penstock.config.limits import MAX_TOKENS

_MOST_CHARS: Final = 65_536
_MOST_DEPTH: Final = 16
KINDS: Final = ("LAST", "CLS", "MEAN", "ALL")
_POOLINGS: Final = {"none": "ALL", "mean": "MEAN", "cls": "CLS", "last": "LAST", "rank": None}
POOLINGS: Final = tuple(_POOLINGS)  # as llama-server calls them; what ranks follows from a model's files
_OTHER_NAMES: Final = {
    "seq_pooling_type": "pooling_type",
    "tok_pooling_type": "pooling_type",
    "normalize": "use_activation",
    "activation": "use_activation",
    "softmax": "use_activation",
}
_NOT_SERVED: Final = {
    "logit_bias": "scores are told as the model gives them",
    "logit_mean": "scores are told as the model gives them",
    "logit_sigma": "scores are told as the model gives them",
    "logit_scale": "scores are told as the model gives them",
    "step_tag_id": "rewards of single steps are not served",
    "returned_token_ids": "rewards of single steps are not served",
    "task": "requests say what they want by their route, and by the task of /pooling",
}


def as_json(value: object, name: str) -> str | None:
    """An object as JSON in one spelling; None for none.

    Args:
        value: an object, its JSON, or None.
        name: of the option, for messages.

    Raises:
        ConfigError: it is no object, or is too long or too deep.
    """
    if value is None:
        return None
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, str):
        if len(value) > _MOST_CHARS:
            raise ConfigError(f"{flag} has {len(value)} characters; allowed: {_MOST_CHARS}.")
        try:
            value = json.loads(value, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{flag} is {format_value(value)}; allowed: an object in JSON ({error}).") from None
    if not isinstance(value, Mapping) or _depth(value) > _MOST_DEPTH:
        raise ConfigError(f"{flag} is {format_value(value)}; allowed: an object in JSON, at most {_MOST_DEPTH} deep.")
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False) if value else None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{flag} cannot be written in JSON: {error}.") from None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _depth(value: object) -> int:
    """How many objects and lists lie in each other, as far as that matters."""
    depth, level = 0, [value]
    while level and depth <= _MOST_DEPTH + 1:
        level = [
            inner
            for one in level
            if isinstance(one, (Mapping, list))
            for inner in (one.values() if isinstance(one, Mapping) else one)
        ]
        depth += 1
    return depth - 1


def overridden(config: Mapping[str, Any], overrides: str | None) -> Mapping[str, Any]:
    """A model's configuration with other values; objects within each other are joined, null is a value too."""
    return config if overrides is None else _joined(config, json.loads(overrides))


def _joined(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(config)
    for name, value in changes.items():
        before = made.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        made[name] = _joined(before, value) if both and before is not None else value
    return made


@dataclass(frozen=True, slots=True)
class PoolerSettings:
    """How a model pools, where its operator says so; None leaves what the model's files say.

    Attributes:
        pooling_type: one of KINDS; ALL gives a vector a token.
        use_activation: whether vectors are normalised and scores pass their activation.
        dimensions: of vectors, for requests that say none.
        enable_chunked_processing: texts beyond the context are embedded in chunks, and the chunks' vectors averaged by
            their lengths.
        max_embed_len: tokens of the longest text that is taken so.
    """

    pooling_type: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None

    @classmethod
    def of(cls, text: str | None) -> PoolerSettings:
        """Reads what `as_json` gave, under vLLM's names.

        Raises:
            ConfigError: a name or value that is not served; the message says what is.
        """
        given: dict[str, Any] = {} if text is None else json.loads(text)
        chosen: dict[str, Any] = {}
        for spelt, value in given.items():
            name = _OTHER_NAMES.get(spelt, spelt)
            if value is None:
                continue
            if name in _NOT_SERVED:
                raise ConfigError(f"--pooler-config sets {spelt}: {_NOT_SERVED[name]}. Leave it out.")
            if name not in cls.__dataclass_fields__:
                known = ", ".join(cls.__dataclass_fields__)
                raise ConfigError(f"--pooler-config has no {format_value(spelt)}; there are: {known}.")
            if name in chosen and chosen[name] != value:
                raise ConfigError(f"--pooler-config says {name} twice, as {chosen[name]!r} and as {value!r}.")
            chosen[name] = value.upper() if isinstance(value, str) else value
        settings = cls(**chosen)
        settings._check()
        return settings

    def _check(self) -> None:
        for name in ("use_activation", "enable_chunked_processing"):
            if (value := getattr(self, name)) is not None and type(value) is not bool:
                raise _refusal(name, value, "true or false")
        for name in ("dimensions", "max_embed_len"):
            value = getattr(self, name)
            if value is not None and not (type(value) is int and 1 <= value <= MAX_TOKENS):
                raise _refusal(name, value, f"an integer from 1 to {MAX_TOKENS}")
        if self.pooling_type is not None and self.pooling_type not in KINDS:
            raise _refusal("pooling_type", self.pooling_type, ", ".join(KINDS))
        if self.max_embed_len is not None and not self.enable_chunked_processing:
            raise _refusal("max_embed_len", self.max_embed_len, "only with enable_chunked_processing")
        if self.enable_chunked_processing and self.pooling_type == "ALL":
            raise _refusal("enable_chunked_processing", True, "only where a text has one vector")


def with_pooling(config: str | None, pooling: str) -> dict[str, Any]:
    """The settings with one of POOLINGS as the way of pooling.

    Raises:
        ConfigError: the settings are no object, or name another way.
    """
    given: dict[str, Any] = json.loads(as_json(config, "pooler_config") or "{}")
    kind = _POOLINGS[pooling]
    if kind is not None and given.get("pooling_type", kind) != kind:
        raise ConfigError(f"--pooling is {pooling}, and --pooler-config says {given['pooling_type']}; leave one out.")
    return given if kind is None else {**given, "pooling_type": kind}


def _refusal(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(f"--pooler-config: {name} is {format_value(value)}; allowed: {allowed}.")
