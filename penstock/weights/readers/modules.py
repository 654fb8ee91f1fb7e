"""The modules a model of sentence-transformers consists of, as its modules.json lists them. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.config.errors import CheckpointError, quoted
from penstock.weights.readers.files import read_object

SERVED = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout", "LogitScore")


@dataclass(frozen=True, slots=True)
class Module:
    """One of them.

    Attributes:
        kind: the last part of its type, for example "Pooling".
        name: of its folder, "" for the model's own.
        settings: its config.json, {} without one.
    """

    kind: str
    name: str
    settings: Mapping[str, Any]


def read_modules(folder: Path) -> tuple[Module, ...] | None:
    """The modules in their order; None without modules.json.

    Raises:
        CheckpointError: the file is damaged, names a folder elsewhere, or a module that is not served.
    """
    file = folder / "modules.json"
    if not file.is_file():
        return None
    try:
        listed = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {str(error)[:200]}. Download it again.") from error
    if not isinstance(listed, list) or not all(isinstance(entry, Mapping) for entry in listed):
        raise CheckpointError(f"{file} must be a list of objects with type and path.")
    found = []
    for entry in listed:
        name, kind = str(entry.get("path", "")), str(entry.get("type")).rpartition(".")[2]
        if kind not in SERVED:
            raise CheckpointError(f"{file} has a module {quoted(kind)}; served: {', '.join(SERVED)}.")
        if ".." in PurePosixPath(name).parts or name.startswith("/") or "\\" in name:
            raise CheckpointError(f"{file} names the path {quoted(name)}; a folder below the model's is needed.")
        found.append(Module(kind, name, read_object(folder / name / "config.json", missing_ok=True) if name else {}))
    kinds = [module.kind for module in found]
    if "Normalize" in kinds and kinds[-1] != "Normalize":
        raise CheckpointError(f"{file} normalises before {kinds[-1]}; only a Normalize at the end is served.")
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Prompts:
    """What stands before texts of certain kinds, as config_sentence_transformers.json says.

    Attributes:
        texts: by name, for example "query".
        default: the name of the one for texts of which nothing is said; None for none.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None


def read_prompts(folder: Path) -> Prompts:
    """The prompts; none without the file.

    Raises:
        CheckpointError: the file is damaged, or the default is not among them.
    """
    file = folder / "config_sentence_transformers.json"
    settings = read_object(file, missing_ok=True)
    texts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
    if not isinstance(texts, Mapping) or not all(isinstance(part, str) for pair in texts.items() for part in pair):
        raise CheckpointError(f"{file}: prompts is {quoted(repr(texts))}; an object of strings is needed.")
    if default is not None and default not in texts:
        raise CheckpointError(
            f"{file}: default_prompt_name is {quoted(str(default))}; allowed: {', '.join(texts) or 'null'}."
        )
    return Prompts(texts, default)


def dense_layers(modules: tuple[Module, ...]) -> list[dict[str, Any]]:
    """Sizes of the dense layers, for `config["dense_layers"]`: name, inputs, outputs, bias, activation."""
    return [
        {
            "name": module.name,
            "inputs": module.settings.get("in_features"),
            "outputs": module.settings.get("out_features"),
            "bias": module.settings.get("bias", True),
            "activation": str(module.settings.get("activation_function", "torch.nn.Tanh")).rpartition(".")[2],
        }
        for module in modules
        if module.kind == "Dense"
    ]
