"""What an engine opens of a model that a manifest describes: a folder with links to its blobs.

Beside a GGUF file lies `NAME.overlay.json`, with the chat template and the sampling defaults of the manifest; a Hugging
Face folder has files of its own for these. A view can be made again from its manifest at any time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from penstock.config.errors import CheckpointError
from penstock.library.digests import Digest
from penstock.library.files import inside, symbolic, write_whole
from penstock.library.manifest import TITLE, Manifest, Texts, read_texts
from penstock.library.names import RegistryName
from penstock.library.template.conversation import conversation_template
from penstock.weights.open import open_checkpoint

_DONE: Final = ".complete"
# Ollama's parameters that a generation_config.json has under another name, or the same.
_SAMPLING: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repeat_penalty": "repetition_penalty",
    "stop": "stop_strings",
}


def view(folder: Path, name: RegistryName, manifest: Manifest, blobs: Mapping[Digest, Path]) -> Path:
    """The path to open a model at; it is made if it is not there.

    Args:
        folder: where views are kept.
        name: of the model, which its files are called by.
        manifest: of the model.
        blobs: where its blobs are.

    Raises:
        CheckpointError: it has no weights that can be opened, or a blob is missing.
    """
    place = folder / manifest.digest.hex[:32] / f"{name.model}-{name.tag}"
    missing = next((part.digest for part in manifest.layers if part.digest not in blobs), None)
    if missing is not None:
        raise CheckpointError(f"{name} lacks the blob {missing}; pull it again: penstock pull {name}")
    if manifest.of("adapter"):
        raise CheckpointError(
            f"{name} has a GGUF adapter (ADAPTER), which is not read; merge it into the weights with llama-export-lora "
            "and make a model FROM the .gguf file that comes out."
        )
    files, models = manifest.of("file"), manifest.of("model")
    if not files and not models:
        kinds = ", ".join(sorted({part.kind for part in manifest.layers})) or "none"
        raise CheckpointError(f"{name} has no weights in GGUF or safetensors; its layers are: {kinds}.")
    opened = place if files else place / f"{name.model}-{name.tag}.gguf"
    if (place / _DONE).is_file() and all(path.exists() for path in place.iterdir()):
        return opened
    try:
        _make(place, opened, manifest, blobs)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be laid out in {place}: {str(error)[:200]}.") from error
    return opened


def _make(place: Path, opened: Path, manifest: Manifest, blobs: Mapping[Digest, Path]) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    files = manifest.of("file")
    for part in files:
        symbolic(inside(place, part.annotations.get(TITLE, "")), blobs[part.digest])
    if not files:
        symbolic(opened, blobs[manifest.of("model")[0].digest])
    _tell(place, opened, read_texts(manifest, blobs), is_file=not files)
    write_whole(place / _DONE, b"")


def _tell(place: Path, opened: Path, texts: Texts, *, is_file: bool) -> None:
    """Writes what the manifest says beside the weights, where the readers look for it."""
    checkpoint = open_checkpoint(opened)
    template = _template(texts, checkpoint.tokenizer_config.get("chat_template"))
    sampling = sampling_of(texts.params)
    if is_file:
        tokenizer_config = {} if template is None else {"chat_template": template}
        overlay = {"tokenizer_config": tokenizer_config, "generation_config": sampling}
        write_whole(opened.with_suffix(".overlay.json"), json.dumps(overlay, ensure_ascii=False).encode())
        return
    if template is not None:
        _replace(place / "chat_template.jinja", template.encode())
    if sampling:
        text = json.dumps({**checkpoint.generation_config, **sampling}, ensure_ascii=False)
        _replace(place / "generation_config.json", text.encode())


def _replace(path: Path, data: bytes) -> None:
    """Writes a file in the place of a link, whose target stays as it is."""
    path.unlink(missing_ok=True)
    write_whole(path, data)


def _template(texts: Texts, own: Any) -> str | None:
    """The chat template, None for the file's own.

    A file's own template is what its model was trained with, so it comes before Ollama's version of it, but not before
    one that was written for this model (TEMPLATE in a Modelfile).
    """
    own = own.get("default") if isinstance(own, Mapping) else own
    source = texts.template if texts.template and (texts.chosen or not own) else None
    if source is None and not texts.system and not texts.messages:
        return None
    return conversation_template(source, own or "", texts.system, texts.messages)


def sampling_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json's fields of Ollama's parameters."""
    found = {theirs: params[ours] for ours, theirs in _SAMPLING.items() if ours in params}
    stop = found.get("stop_strings")
    return found | ({"stop_strings": [stop]} if isinstance(stop, str) else {})


def engine_options(params: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options of Ollama's parameters: how long a context is asked for."""
    length = params.get("num_ctx")
    return {"max_model_len": length} if type(length) is int and length > 0 else {}


def sweep_views(folder: Path, manifests: set[str]) -> None:
    """Removes the views of manifests that are gone; `manifests` holds the digests of those that are there."""
    kept = {digest[:32] for digest in manifests}
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)
