"""Makes a model of a Modelfile: the parts of another model, with texts of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.config.errors import ConfigError
from penstock.library.make import Told, manifest_of
from penstock.library.manifest import CHOSEN, CONFIG, TEXTS, Layer, Manifest, layer, make_manifest, read_texts
from penstock.library.modelfile import Modelfile
from penstock.library.names import RegistryName, parse_name
from penstock.library.resolve import find
from penstock.library.store import Store
from penstock.library.template.conversation import conversation_template, is_jinja
from penstock.library.views import view
from penstock.text.template import ChatTemplate
from penstock.weights.open import open_checkpoint
from penstock.weights.writers.float_folder import float_base
from penstock.weights.writers.merge import Merged, merge_adapters

Quantize = Callable[[Path, Path], None]
"""(model, .gguf file to write)"""


def create(
    store: Store,
    name: RegistryName,
    made: Modelfile,
    folder: Path,
    *,
    quantize: Quantize | None = None,
    told: Told = lambda done, total: None,
) -> Manifest:
    """Makes a model and gives it its name.

    Args:
        store: where.
        name: of the new model.
        made: from `parse_modelfile`.
        folder: that paths in it are relative to.
        quantize: writes the model's weights smaller first; None keeps them.
        told: progress.

    Raises:
        ConfigError: FROM names no model that is here, or an adapter does not belong to it.
        TemplateError: the template is none, or cannot be translated.
        CheckpointError: a part is damaged.
    """
    with store.loading(), TemporaryDirectory(dir=store.temporary()) as temporary:
        base = _base(store, made, folder, Path(temporary), quantize, told)
        before = read_texts(base, store.blobs(base))
        _check_template(store, made, base, Path(temporary))
        kept = [part for part in base.layers if part.kind not in _replaced(made)]
        layers = [*kept, *_texts(store, made, before.params)]
        manifest = make_manifest(base.config, layers)
        store.put(name, manifest)
    return manifest


def _base(
    store: Store, made: Modelfile, folder: Path, temporary: Path, quantize: Quantize | None, told: Told
) -> Manifest:
    """The manifest that the model starts from; its blobs are in the store."""
    beside = folder / Path(made.base).expanduser()
    texts: tuple[Layer, ...] = ()
    if beside.exists():
        path = beside
    else:
        parsed = parse_name(made.base, store.places.registry)
        found = store.manifest(parsed) if isinstance(parsed, RegistryName) else None
        if found is not None:
            for part in found[0].blobs:
                store.take(store.blob(part.digest), part.digest)
            if not made.adapters and quantize is None:
                return found[0]
            texts = tuple(part for part in found[0].layers if part.kind in TEXTS)
        path = find(made.base, store).path
    changes = [Merged(folder / Path(adapter).expanduser()) for adapter in made.adapters]
    if missing := next((change.path for change in changes if not change.path.exists()), None):
        raise ConfigError(f"there is no adapter at {missing}.")
    if changes:
        merge_adapters(float_base(path, temporary / "floats"), changes, temporary / "merged")
        path = temporary / "merged"
    if quantize is not None:
        smaller = temporary / "quantised.gguf"
        quantize(path, smaller)
        path = smaller
    base = manifest_of(store, path, told)
    return make_manifest(base.config, (*base.layers, *texts))


def _replaced(made: Modelfile) -> set[str]:
    """Kinds of layers that do not come from the base."""
    given = {
        "template": made.template is not None,
        "system": made.system is not None,
        "license": bool(made.licenses),
        "messages": bool(made.messages),
        "params": bool(made.params),
    }
    return {kind for kind, is_given in given.items() if is_given}


def _check_template(store: Store, made: Modelfile, base: Manifest, temporary: Path) -> None:
    """Refuses a template that no conversation can be written with, and texts that need one where there is none."""
    system, messages = made.system or "", made.messages
    if made.template is not None:
        ChatTemplate(conversation_template(made.template, "", system, messages))
    elif (system or messages) and not base.of("template"):
        path = view(temporary, RegistryName("base"), make_manifest(base.config, _weights(base)), store.blobs(base))
        own = open_checkpoint(path).tokenizer_config.get("chat_template")
        own = own.get("default") if isinstance(own, Mapping) else own
        ChatTemplate(conversation_template(None, str(own or ""), system, messages))


def _weights(base: Manifest) -> list[Layer]:
    return [part for part in base.layers if part.kind in ("model", "file")]


def _texts(store: Store, made: Modelfile, before: Mapping[str, Any]) -> list[Layer]:
    found: list[Layer] = []

    def add(kind: str, data: bytes, **annotations: str) -> None:
        part = store.add(data, CONFIG)
        found.append(layer(kind, part.digest, part.size, **annotations))

    if made.template is not None:
        add("template", made.template.encode(), **{CHOSEN: "jinja" if is_jinja(made.template) else "go"})
    if made.system is not None:
        add("system", made.system.encode())
    for license in made.licenses:
        add("license", license.encode())
    if made.messages:
        add("messages", json.dumps(list(made.messages), ensure_ascii=False).encode())
    if made.params:
        add("params", json.dumps({**before, **made.params}, ensure_ascii=False).encode())
    return found
