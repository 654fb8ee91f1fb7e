"""The text side of a GGUF file, kept beside its packed weights: the next start maps its vocabulary.

The file (`weights.pack_cache`, checksummed and renamed when complete) is of one state of the model's file and of this
package's code. It is bounded by the vocabulary; a model has one, in the place of the last.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import tokenizers

from penstock.config.code import code_digest
from penstock.config.environment import pack_folder
from penstock.config.names import served_name
from penstock.quant.tensor import StoredTensor, TensorInfo
from penstock.text.kept_vocabulary import SMALLEST, KeptVocabulary, tables_of
from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoint import Checkpoint, with_overrides
from penstock.weights.pack_cache import PackCache, PackCacheError, PackWriter, file_name, fingerprint

log = logging.getLogger(__name__)
VERSION: Final = 1
TABLES: Final = ("pieces", "offsets", "order")
_SHORT: Final = 256  # entries of lists that are kept of the metadata


@dataclass(slots=True)
class Description:
    """What a model's file says beside its tensors; as `weights.checkpoint.Checkpoint`."""

    path: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] = field(default_factory=lambda: MappingProxyType({}))

    def read(self, name: str) -> StoredTensor:
        """There are none."""
        raise KeyError(name)


def read_text(model: str, cache: str, overrides: str | None = None) -> tuple[Checkpoint, Tokenizer]:
    """What the files of a model say, and its tokenizer; from what was kept of them where there is that.

    Args:
        model: as `open_description` takes it.
        cache: EngineOptions.pack_cache.
        overrides: other values for the configuration: EngineOptions.hf_overrides. What is kept is without them.

    Raises:
        CheckpointError: nothing usable is there.
    """
    checkpoint, tokenizer = _read(model, cache)
    return with_overrides(checkpoint, overrides), tokenizer


def _read(model: str, cache: str) -> tuple[Checkpoint, Tokenizer]:
    place = _place(model, cache)
    identity = None if place is None else _identity(Path(model).expanduser())  # of the file before it is read
    if place is not None and identity is not None and (found := _found(model, place, identity)) is not None:
        return found
    checkpoint = described(model)
    tokenizer = (
        Tokenizer.from_gguf(checkpoint.metadata) if checkpoint.metadata else Tokenizer.from_folder(checkpoint.path)
    )
    if place is not None and identity is not None and tokenizer.vocab_size >= SMALLEST:
        _keep(checkpoint, tokenizer, place, identity)
    return checkpoint, tokenizer


def described(model: str) -> Checkpoint:
    """As `open_description`; readers of files are loaded only for that."""
    from penstock.weights.open import open_description

    return open_description(model)


def _place(model: str, cache: str) -> Path | None:
    """Where a model's text is kept; None for models and settings of which nothing is."""
    path, folder = Path(model).expanduser(), pack_folder(cache)
    if folder is None or path.suffix != ".gguf" or not path.is_file():
        return None
    return (folder / file_name(path, served_name(str(path)))).with_suffix(".text")


def _identity(path: Path) -> str | None:
    """None for files that cannot be looked at."""
    try:
        return code_digest(VERSION, fingerprint(path, "text"))
    except OSError:
        return None


def _found(model: str, place: Path, identity: str) -> tuple[Checkpoint, Tokenizer] | None:
    path = Path(model).expanduser()
    try:
        file = PackCache(place, identity)
        facts = json.loads(bytes(file.data("facts")))
        tables = {name: file.data(name) for name in TABLES}
        described = Description(path=path, **facts["files"])
        kept = KeptVocabulary.of(tables, facts["vocabulary"], lambda: _built(model))
    except (PackCacheError, LookupError, TypeError, ValueError, OSError) as error:
        log.debug("%s is left: %s", place, error)
        return None
    return described, Tokenizer.from_kept(kept)


def _built(model: str) -> tokenizers.Tokenizer:
    """What encodes text, from the model's file."""
    return Tokenizer.from_gguf(described(model).metadata).backend


def _keep(checkpoint: Checkpoint, tokenizer: Tokenizer, place: Path, identity: str) -> None:
    """Writes it; where that is not possible, the next start reads the model's file again."""
    files = {
        "config": dict(checkpoint.config),
        "generation_config": dict(checkpoint.generation_config),
        "tokenizer_config": dict(checkpoint.tokenizer_config),
        "metadata": {key: value for key, value in checkpoint.metadata.items() if not _is_long(value)},
    }
    try:
        vocabulary = tokenizer.kept()
        text = json.dumps({"files": files, "vocabulary": vocabulary.facts()})
        if json.loads(text)["files"] != files:
            raise ValueError("its configuration has no form in JSON")
        tables = tables_of(vocabulary.words, vocabulary.size)
        writer = PackWriter(place, identity, str(checkpoint.path.resolve()))
    except (TypeError, ValueError, OSError) as error:
        log.info("the vocabulary is not kept: %s", error)
        return
    try:
        for name, data in {"facts": memoryview(text.encode()), **tables}.items():
            writer.put(name, [(b"", data)])
        writer.finish()
    except OSError as error:
        writer.discard()
        log.info("the vocabulary is not kept: %s", error.strerror or error)


def _is_long(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > _SHORT
