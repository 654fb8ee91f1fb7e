"""What a model is, read from its first bytes at a server, so that one that cannot run here is refused beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.config.errors import CheckpointError
from penstock.config.resolve import DTYPE_BYTES, ModelFacts
from penstock.library.files import symbolic
from penstock.library.transfer import Manner, Source, fetch_beginning
from penstock.library.web import Web
from penstock.models.families import named
from penstock.models.gguf.configuration import gguf_config
from penstock.weights.checkpoint import text_config
from penstock.weights.facts import model_facts
from penstock.weights.kept_text import Description
from penstock.weights.readers.gguf_file import read_gguf_file

HEADER_PARTS: Final = 4  # of a file, beyond which its header is not looked for


@dataclass(frozen=True, slots=True)
class Outlook:
    """A model that is about to be loaded.

    Attributes:
        name: of the model.
        bytes: to load.
        facts: what its headers tell; None where they tell too little.
        others: further quantisations of it, and their facts.
    """

    name: str
    bytes: int
    facts: ModelFacts | None
    others: Mapping[str, ModelFacts]


Judge = Callable[[Outlook], str | None]
"""Why a model cannot run here, as a sentence with the remedy; None if it can."""


def check_architecture(config: Mapping[str, Any], name: str, *, has_fallback: bool) -> None:
    """Refuses a configuration whose architecture nobody here runs.

    Raises:
        CheckpointError: the message names it.
    """
    listed = config.get("architectures")
    names = [str(item) for item in listed] if isinstance(listed, (list, tuple)) else []
    if names and not has_fallback and not any(named(item) for item in names):
        raise CheckpointError(
            f"{name} has the architecture {', '.join(names)[:120]}, which Penstock does not run; docs/models.md lists "
            "those it runs. With transformers installed, more of them run; --force pulls it nevertheless."
        )


def folder_facts(config: Mapping[str, Any], name: str, weight_bytes: int) -> ModelFacts | None:
    """Facts of safetensors that are not here yet: their bytes, and what config.json says."""
    description = Description(Path(name), config, {}, {}, {})
    with suppress(CheckpointError, ValueError, TypeError, KeyError, AttributeError):
        facts = model_facts(description)
        quantised = bool(config.get("quantization_config") or text_config(config).get("quantization_config"))
        size = DTYPE_BYTES[facts.checkpoint_dtype]
        values = weight_bytes // size
        floats = 0 if quantised else values
        return replace(
            facts, name=name, file_bytes=weight_bytes, parameters=values, float_values=floats, float_bytes=floats * size
        )
    return None


@dataclass(frozen=True, slots=True)
class Announced:
    """A GGUF file at a server.

    Attributes:
        name: of the model.
        source: the file, or the first one of a split model.
        target: where it will be.
        manner: as of `fetch`.
        whole: bytes of all its files.
    """

    name: str
    source: Source
    target: Path
    manner: Manner
    whole: int


def gguf_facts(web: Web, file: Announced) -> ModelFacts | None:
    """Facts of a file from its header, which is loaded as the first part of the file itself; None if it tells little.

    Raises:
        CheckpointError: an architecture or a format that is not read.
        WebError, ConfigError: as `fetch`.
    """
    if not file.source.ranges:
        return None
    for parts in (1, HEADER_PARTS):
        begun = fetch_beginning(web, file.source, file.target, file.manner, parts)
        opened = begun.with_suffix(".gguf")
        try:
            if not begun.is_file():  # somebody else has brought it meanwhile
                begun = file.target
            symbolic(opened, begun)
            return _facts(opened, file.whole, file.name)
        except _HeaderError:
            continue
        finally:
            opened.unlink(missing_ok=True)
    return None


class _HeaderError(Exception):
    """The header has not come whole, or is none."""


def _facts(path: Path, whole: int, name: str) -> ModelFacts | None:
    try:
        file = read_gguf_file(path)
    except CheckpointError:
        raise _HeaderError from None
    tensors = dict(file.tensors)
    config = gguf_config(file.metadata, tensors)
    with suppress(CheckpointError, ValueError, TypeError, KeyError, AttributeError):
        facts = model_facts(Description(path, config, {}, {}, {}))
        floats = [t for t in tensors.values() if t.format in ("f32", "f16", "bf16") and len(t.shape) > 1]
        values = sum(_count(t.shape) for t in tensors.values())
        stored = max(1, sum(t.nbytes for t in tensors.values()))
        return replace(
            facts,
            name=name,
            file_bytes=whole,
            parameters=int(values * max(1.0, whole / stored)),
            float_values=sum(_count(t.shape) for t in floats),
            float_bytes=sum(t.nbytes for t in floats),
        )
    return None


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
