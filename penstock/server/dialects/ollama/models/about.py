"""What Ollama's clients ask of models: the list, what runs, what one can do."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.server.context import ServerContext

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
    return context.model if name in called(context.model) else name


def listed(context: ServerContext) -> dict[str, Any]:
    """An entry of the list of models."""
    info, name = context.frontend.info, _tagged(context.model)
    size, changed = _weights(Path(info.model_path))
    facts = (context.model, info.architecture, info.dtype, info.numbers, size)
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


def kept(context: ServerContext) -> dict[str, Any]:
    """An entry of the list of what is loaded: it stays so."""
    info, entry = context.frontend.info, listed(context)
    del entry["modified_at"]
    on_device = 0 if info.device == "cpu" else entry["size"]
    return {**entry, "expires_at": _NEVER, "size_vram": on_device, "context_length": info.max_model_len}


def described(context: ServerContext) -> dict[str, Any]:
    """A model in detail."""
    text = context.frontend.text
    info = context.frontend.info
    entry = listed(context)
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
            "general.basename": context.model,
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


def _weights(path: Path) -> tuple[int, str]:
    """Bytes of the files that hold a model's weights, and when the newest was changed; 0 where there are none."""
    files = [path] if path.is_file() else [file for end in _WEIGHTS for file in path.glob(f"*{end}")]
    stats = [file.stat() for file in files]
    changed = datetime.fromtimestamp(max((stat.st_mtime for stat in stats), default=0.0), UTC)
    return sum(stat.st_size for stat in stats), changed.isoformat().replace("+00:00", "Z")
