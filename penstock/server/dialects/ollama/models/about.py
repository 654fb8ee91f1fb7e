"""What Ollama's clients ask of models: the list, what runs, what one can do."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from penstock.engine.api import EngineInfo
from penstock.host.model_host import ModelHost
from penstock.server.context import ModelContext, ServerContext

_NEVER = "9999-12-31T23:59:59Z"
_WEIGHTS = (".safetensors", ".gguf")
_OLLAMA_NAMES = {"repetition_penalty": "repeat_penalty"}


def _tagged(name: str) -> str:
    """A name with a tag, as Ollama lists models."""
    return name if ":" in name.rsplit("/", 1)[-1] else f"{name}:latest"


def called(name: str) -> tuple[str, ...]:
    """A model's name, and what else it may be called."""
    others = (_tagged(name), name.removesuffix(":latest"))
    return (name, *(other for other in dict.fromkeys(others) if other != name))


def served(context: ServerContext, name: str) -> str:
    """The served name of a model that is called so, with or without the tag; or the name as it is."""
    names = context.models.names()
    return next((known for known in called(name) if known in names), name)


def listed(model: ModelContext) -> dict[str, Any]:
    """An entry of the list of models."""
    return _entry(model.model, model.frontend.info)


def _entry(called_so: str, info: EngineInfo) -> dict[str, Any]:
    name = _tagged(called_so)
    size, changed = _weights(Path(info.model_path))
    facts = (called_so, info.architecture, info.dtype, info.numbers, size)
    family = info.architecture.removesuffix("ForCausalLM").lower()
    details = {
        "parent_model": "",
        "format": "gguf" if info.model_path.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _short(info.parameters),
        "quantization_level": info.stored.upper(),
    }
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()
    return {"name": name, "model": name, "modified_at": changed, "size": size, "digest": digest, "details": details}


def kept(name: str, info: EngineInfo, seconds: float | None) -> dict[str, Any]:
    """An entry of the list of what is loaded, and for how long; None for ever."""
    entry = _entry(name, info)
    del entry["modified_at"]
    expires = _NEVER if seconds is None else _rfc3339(datetime.now(UTC) + timedelta(seconds=seconds))
    on_device = 0 if info.device == "cpu" else entry["size"]
    return {**entry, "expires_at": expires, "size_vram": on_device, "context_length": info.max_model_len}


def described(model: ModelContext) -> dict[str, Any]:
    """A model in detail."""
    text = model.frontend.text
    info = model.frontend.info
    entry = listed(model)
    sources = text.template.sources if text.template else {}
    template = sources.get("default", "")
    parameters = "\n".join(f"{_OLLAMA_NAMES.get(name, name)} {value}" for name, value in sorted(text.defaults.items()))
    can = {
        "completion": text.pooling.generates,
        "embedding": not text.pooling.labels,
        "tools": text.answers.calls is not None,
        "thinking": text.answers.reasoning is not None,
    }
    family = entry["details"]["family"]
    return {
        "license": "",
        "modelfile": f"FROM {entry['name']}\n" + "".join(f"PARAMETER {row}\n" for row in parameters.splitlines()),
        "parameters": parameters,
        "template": template,
        "details": entry["details"],
        "model_info": {
            "general.architecture": family,
            "general.basename": model.model,
            "general.parameter_count": info.parameters,
            f"{family}.context_length": info.max_model_len,
            f"{family}.embedding_length": text.pooling.size,
            f"{family}.vocab_size": info.vocab_size,
        },
        "capabilities": [name for name, there in can.items() if there],
        "modified_at": entry["modified_at"],
    }


def _short(count: int) -> str:
    """A number of parameters as Ollama tells it: 6950912 → "6.95M", 751632384 → "751.63M", 8030261248 → "8.0B"."""
    for size, unit, digits in ((10**12, "T", 1), (10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if count >= size:
            return f"{count / size:.{digits}f}{unit}"
    return str(count) if count else ""


async def listed_by_host(host: ModelHost) -> list[dict[str, Any]]:
    """Every model that can be asked for; more is known of those that are loaded."""
    await host.refresh()
    there = {entry.name: entry.info for entry in host.entries()}

    def made() -> list[dict[str, Any]]:
        found = []
        for source in host.names.sources.values():
            info = there.get(source.name)
            if info is not None:
                found.append(_entry(source.name, info))
            elif source.options is not None:
                found.append(_unloaded(source.name, source.options.model))
            else:
                found.append(_unloaded(source.name, ""))
        return found

    return await asyncio.to_thread(made)


def _unloaded(name: str, model: str) -> dict[str, Any]:
    size, changed = _weights(Path(model).expanduser()) if model else (0, _rfc3339(datetime.fromtimestamp(0, UTC)))
    details = {"parent_model": "", "format": "gguf" if model.endswith(".gguf") else "safetensors", "family": ""}
    more: dict[str, Any] = {"families": None, "parameter_size": "", "quantization_level": "", **details}
    digest = hashlib.sha256(repr((name, model, size, changed)).encode()).hexdigest()
    told = {"name": _tagged(name), "model": _tagged(name), "modified_at": changed, "size": size}
    return {**told, "digest": digest, "details": more}


def _rfc3339(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _weights(path: Path) -> tuple[int, str]:
    """Bytes of the files that hold a model's weights, and when the newest was changed; 0 where there are none."""
    files = [path] if path.is_file() else [file for end in _WEIGHTS for file in path.glob(f"*{end}")]
    stats = [file.stat() for file in files]
    changed = datetime.fromtimestamp(max((stat.st_mtime for stat in stats), default=0.0), UTC)
    return sum(stat.st_size for stat in stats), _rfc3339(changed)
