"""What models a server has: a file that lists them, or a folder that holds them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import yaml

from penstock.config.errors import ConfigError, format_value
from penstock.config.names import served_name
from penstock.config.options import EngineOptions
from penstock.config.resolve import validate
from penstock.host.source import ModelSource, RemoteModel

_MODEL_KEYS = ("model", "remote", "options", "aliases", "pinned", "ttl")
_REMOTE_KEYS = ("url", "model", "key_from", "connect_timeout", "timeout", "retries")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_MAX_FILE_BYTES = 2**20
_SET_ELSEWHERE = ("model", "served_model_name", "memory")


def seconds_of(given: object, what: str) -> float | None:
    """Seconds of 90, "90s", "5m" or "1h"; -1 is for ever, None.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(given, (int, float)) and not isinstance(given, bool) and math.isfinite(given):
        return None if given < 0 else float(given)
    if given in ("-1", "-1s", "-1m"):
        return None
    found = _DURATION.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise ConfigError(f"{what} is {format_value(given)}; allowed: seconds, or 90s, 5m, 1h; -1 for ever.")
    return float(found[1]) * _UNITS[found[2] or "s"]


def read_models_file(path: Path, defaults: EngineOptions) -> Mapping[str, ModelSource]:
    """The models that a YAML file lists; `defaults` are the options of those that say nothing else.

    Raises:
        ConfigError: it cannot be read, or says something that is not known; the message names the place.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_FILE_BYTES} bytes; a list of models is shorter.")
        text = path.read_text(encoding="utf-8")
        listed = yaml.safe_load(text)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the list of models {path} cannot be read: {error}.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is no YAML: {' '.join(str(error).split())[:300]}") from None
    top = _object(listed, str(path), ("models", "aliases"))
    models = _object(top.get("models"), f"{path}: models", None)
    if not models:
        raise ConfigError(f"{path} lists no models; write for example\nmodels:\n  small:\n    model: FOLDER_OR_GGUF")
    sources = {name: _source(name, given, f"{path}: models.{name}", defaults) for name, given in models.items()}
    for alias, given in _object(top.get("aliases") or {}, f"{path}: aliases", None).items():
        for name, weight in _weights(given, f"{path}: aliases.{alias}", sources).items():
            source = sources[name]
            sources[name] = replace(source, aliases=(*source.aliases, (alias, weight)))
    return sources


def models_in(folder: Path, defaults: EngineOptions) -> Mapping[str, ModelSource]:
    """The models that lie in a folder, by the names of their folders and files.

    Raises:
        ConfigError: it cannot be listed.
    """
    try:
        entries = sorted(folder.expanduser().iterdir())
    except OSError as error:
        raise ConfigError(f"the folder of models {folder} cannot be listed: {error.strerror or error}.") from None
    found: dict[str, ModelSource] = {}
    for path in entries:
        if _is_model(path):
            name = served_name(str(path))
            found.setdefault(name, ModelSource(name, replace(defaults, model=str(path), served_model_name=name)))
    return found


def _is_model(path: Path) -> bool:
    """Whether a folder holds a configuration or a GGUF file, or a file is the first of a GGUF model."""
    try:
        if path.is_dir():
            return (path / "config.json").is_file() or any(path.glob("*.gguf"))
        shard = re.search(r"-(\d{5})-of-\d{5}$", path.stem)
        return path.suffix == ".gguf" and (shard is None or int(shard[1]) == 1)
    except OSError:
        return False


def _source(name: object, given: object, where: str, defaults: EngineOptions) -> ModelSource:
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > 200:
        raise ConfigError(f"{where}: a model's name is printable text of 1 to 200 characters.")
    about = _object({"model": given} if isinstance(given, str) else given, where, _MODEL_KEYS)
    if ("model" in about) == ("remote" in about):
        raise ConfigError(f"{where}: say either model, a folder or a GGUF file, or remote, another server.")
    aliases = about.get("aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise ConfigError(f"{where}.aliases is {format_value(aliases)}; allowed: a list of names.")
    pinned = about.get("pinned", False)
    if not isinstance(pinned, bool):
        raise ConfigError(f"{where}.pinned is {format_value(pinned)}; allowed: true, false.")
    ttl = None if about.get("ttl") is None else seconds_of(about["ttl"], f"{where}.ttl")
    pinned = pinned or (about.get("ttl") is not None and ttl is None)
    remote = _remote(about["remote"], f"{where}.remote") if "remote" in about else None
    options = None if remote is not None else _options(about, name, where, defaults)
    return ModelSource(name, options, remote, tuple((alias, 1.0) for alias in aliases), pinned, ttl)


def _options(about: Mapping[str, Any], name: str, where: str, defaults: EngineOptions) -> EngineOptions:
    if not isinstance(about["model"], str) or not about["model"]:
        raise ConfigError(f"{where}.model is {format_value(about['model'])}; allowed: a folder or a GGUF file.")
    names = tuple(field.name for field in fields(EngineOptions) if field.name not in _SET_ELSEWHERE)
    given = {key.replace("-", "_"): value for key, value in _object(about.get("options") or {}, where, None).items()}
    _object(given, f"{where}.options", names)
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    options = replace(defaults, **given, model=about["model"], served_model_name=name)
    try:
        validate(options)
    except ConfigError as error:
        raise ConfigError(f"{where}.options: {error}") from None
    return options


def _remote(given: object, where: str) -> RemoteModel:
    about = _object(given, where, _REMOTE_KEYS)
    url = about.get("url")
    if not isinstance(url, str) or not re.fullmatch(r"https?://[^\s?#]+", url):
        raise ConfigError(f"{where}.url is {format_value(url)}; allowed: http://... or https://..., up to /v1.")
    for key in ("model", "key_from"):
        if about.get(key) is not None and not (isinstance(about[key], str) and about[key]):
            raise ConfigError(f"{where}.{key} is {format_value(about[key])}; allowed: a text that is not empty.")
    if not about.get("model"):
        raise ConfigError(f"{where}.model is missing: the model's name on {url}.")
    retries = about.get("retries", 2)
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= 10:
        raise ConfigError(f"{where}.retries is {format_value(retries)}; allowed: 0 to 10.")
    times = {key: seconds_of(about[key], f"{where}.{key}") for key in ("connect_timeout", "timeout") if key in about}
    for key, value in times.items():
        if not value:
            raise ConfigError(f"{where}.{key} is {format_value(about[key])}; allowed: more than 0 seconds.")
    checked = {key: value for key, value in times.items() if value}
    return RemoteModel(url.rstrip("/"), about["model"], about.get("key_from"), retries=retries, **checked)


def _weights(given: object, where: str, sources: Mapping[str, ModelSource]) -> Mapping[str, float]:
    weights = {given: 1.0} if isinstance(given, str) else _object(given, where, None)
    for name, weight in weights.items():
        if name not in sources:
            raise ConfigError(f"{where} names {format_value(name)}, which is no model of the list.")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise ConfigError(f"{where}.{name} is {format_value(weight)}; allowed: a weight above 0.")
    if not weights:
        raise ConfigError(f"{where} names no model.")
    return {name: float(weight) for name, weight in weights.items()}


def _object(given: object, where: str, keys: tuple[str, ...] | None) -> Mapping[str, Any]:
    """A mapping whose keys are texts, of these where they are given."""
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise ConfigError(f"{where} is {format_value(given)}; allowed: names with what they mean, one a line.")
    unknown = [key for key in given if keys is not None and key not in keys]
    if unknown:
        raise ConfigError(f"{where} has {format_value(unknown[0])}; allowed: {', '.join(keys or ())}.")
    return given
