"""The store: Ollama's layout, read in place; names that find, copies that share, removals that free."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config.environment import ModelPlaces, model_places
from penstock.config.errors import CheckpointError, ConfigError
from penstock.library.digests import digest_of
from penstock.library.make import add_path, copy_model
from penstock.library.manifest import (
    CONFIG,
    FILE,
    TITLE,
    Layer,
    Manifest,
    layer,
    make_manifest,
    parse_manifest,
    read_texts,
)
from penstock.library.names import RegistryName, parse_name
from penstock.library.resolve import UnknownModelError, find
from penstock.library.store import Store
from penstock.weights.open import bundled_model_path, open_checkpoint


def ollama_model(root: Path, name: str, model: Path, texts: dict[str, bytes]) -> Manifest:
    """A model as Ollama's own pull leaves it."""
    blobs = root / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)

    def blob(kind: str, data: bytes) -> Layer:
        digest = digest_of(data)
        (blobs / digest.file_name).write_bytes(data)
        return layer(kind, digest, len(data))

    config = {"model_format": "gguf", "model_family": "qwen3", "model_type": "6.9M", "file_type": "Q8_0"}
    layers = [blob("model", model.read_bytes()), *(blob(kind, data) for kind, data in texts.items())]
    described = replace(blob("", json.dumps(config).encode()), media_type=CONFIG)
    manifest = make_manifest(described, layers)
    parsed = parse_name(name)
    assert isinstance(parsed, RegistryName)
    path = root.joinpath("manifests", *parsed.parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest.data)
    return manifest


PARAMS = {"temperature": 0.25, "stop": ["<|im_end|>"], "num_ctx": 512, "repeat_penalty": 1.5}


def test_a_store_of_ollama_is_read_in_place(store: Store, quantised: Path) -> None:
    root = store.places.ollama[0]
    texts = {"params": json.dumps(PARAMS).encode(), "license": b"Apache-2.0", "system": b"You are a concierge."}
    ollama_model(root, "concierge:8b", quantised, texts)
    before = sorted(path.as_posix() for path in root.rglob("*"))
    entry = store.find("concierge:8b")
    assert entry is not None and entry.where == "ollama"
    assert entry.details == {
        "format": "gguf", "family": "qwen3", "parameter_size": "6.9M", "quantization_level": "Q8_0",
    }  # fmt: skip
    assert entry.options == {"max_model_len": 512}
    opened = open_checkpoint(entry.path)
    assert os.path.samefile(entry.path, root / "blobs" / f"sha256-{hashlib.sha256(quantised.read_bytes()).hexdigest()}")
    assert opened.generation_config["temperature"] == 0.25
    assert opened.generation_config["repetition_penalty"] == 1.5
    assert "You are a concierge." in opened.tokenizer_config["chat_template"]
    assert sorted(path.as_posix() for path in root.rglob("*")) == before
    assert [e.name for e in store.list()] == ["concierge:8b", "penstock-concierge"]
    with pytest.raises(ConfigError, match="ollama rm concierge:8b"):
        store.remove("concierge:8b")


def test_a_system_message_stands_before_conversations_that_lack_one(store: Store, quantised: Path) -> None:
    from penstock.engine.text_pipeline import TextPipeline

    ollama_model(store.places.ollama[0], "c", quantised, {"system": b'Say "{{ hi }}" %} always.'})
    entry = store.find("c")
    assert entry is not None
    text = TextPipeline.load(str(entry.path))
    plain = TextPipeline.load(str(quantised))
    question = {"role": "user", "content": "Hello"}
    system = {"role": "system", "content": 'Say "{{ hi }}" %} always.'}
    render = lambda pipeline, turns: pipeline.template.render(turns)  # noqa: E731
    assert render(text, [question]) == render(plain, [system, question])
    other = {"role": "system", "content": "Be brief."}
    assert render(text, [other, question]) == render(plain, [other, question])


def test_copies_share_their_parts_and_removal_frees_with_the_last(store: Store, quantised: Path) -> None:
    add_path(store, quantised, RegistryName("a"))
    size = quantised.stat().st_size
    blob = next((store.root / "blobs").glob("sha256-*"))
    assert any(os.path.samefile(path, quantised) for path in (store.root / "blobs").iterdir()) or blob.exists()
    copy_model(store, "a", "me/b:x")
    assert [entry.name for entry in store.list()][:2] == ["a:latest", "registry.ollama.ai/me/b:x"]
    assert store.remove("a") < size
    entry = store.find("registry.ollama.ai/me/b:x")
    assert entry is not None and open_checkpoint(entry.path).config["model_type"] == "qwen3"
    assert store.remove("registry.ollama.ai/me/b:x") >= size
    assert list((store.root / "blobs").iterdir()) == [] and not any((store.root / "views").glob("*/"))
    with pytest.raises(ConfigError, match="no model"):
        copy_model(store, "a", "b")


def test_a_folder_becomes_a_model(store: Store) -> None:
    add_path(store, bundled_model_path(), RegistryName("c", "v1"))
    entry = store.find("c:v1")
    assert entry is not None and entry.details["format"] == "safetensors"
    opened = open_checkpoint(entry.path)
    assert opened.tokenizer_config["chat_template"]
    assert find("c:v1", store).name == "c:v1"


def test_a_blob_that_is_missing_or_short_is_told(store: Store, quantised: Path) -> None:
    manifest = ollama_model(store.root, "c", quantised, {})
    path = store.root / "blobs" / manifest.layers[0].digest.file_name
    path.write_bytes(path.read_bytes()[:-1])
    entry = store.find("c")
    assert entry is not None
    with pytest.raises(CheckpointError, match="pull it again"):
        _ = entry.path


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{}", b"\xff", b'{"schemaVersion":2}', b'{"schemaVersion":2,"config":{},"layers":[]}',
        b'{"schemaVersion":2,"config":{"mediaType":"x","digest":"sha256:../../etc","size":1},"layers":[]}',
        b'{"schemaVersion":2,"config":{"mediaType":"x","digest":"sha256:' + b"a" * 64 + b'","size":-1},"layers":[]}',
        b'{"schemaVersion":2,"manifests":[],"mediaType":"application/vnd.oci.image.index.v1+json"}', b"[" * 9999,
    ],
)  # fmt: skip
def test_damaged_manifests_are_refused(store: Store, text: bytes) -> None:
    with pytest.raises(CheckpointError):
        parse_manifest(text, "m")
    path = store.root / "manifests/registry.ollama.ai/library/m/latest"
    path.parent.mkdir(parents=True)
    path.write_bytes(text)
    assert [entry.name for entry in store.list()] == ["penstock-concierge"]
    with pytest.raises(CheckpointError):
        store.find("m")


def test_pruning_keeps_what_is_used_and_waits_for_pulls(store: Store, quantised: Path) -> None:
    add_path(store, quantised, RegistryName("a"))
    stray = store.root / "blobs" / ("sha256-" + "0" * 64)
    stray.write_bytes(b"12345")
    (store.root / "partial").mkdir()
    (store.root / "partial/x.partial").write_bytes(b"123")
    with store.loading():
        assert store.prune() == 0 and stray.exists()
    assert store.prune() == 8
    assert not stray.exists() and store.find("a") is not None and open_checkpoint(store.find("a").path)


def test_unknown_names_get_the_nearest(store: Store, quantised: Path) -> None:
    add_path(store, quantised, RegistryName("llama3.2", "1b"))
    with pytest.raises(UnknownModelError, match=r"Nearest here: llama3.2:1b\. To load it: penstock pull lama3.2:1b"):
        find("lama3.2:1b", store)
    with pytest.raises(UnknownModelError, match="Nearest here: penstock-concierge"):
        find("concierge", store)
    with pytest.raises(UnknownModelError, match="A name is"):
        find("./nothing.gguf", store)
    with pytest.raises(UnknownModelError, match="no model's name"):
        find("what is this?", store)


def test_places_come_from_the_environment(tmp_path: Path) -> None:
    plain = model_places({}, tmp_path)
    assert plain.store == tmp_path / ".local/share/penstock/models" and plain.hub == tmp_path / ".cache/huggingface/hub"
    assert plain.ollama[0] == tmp_path / ".ollama/models" and plain.endpoint == "https://huggingface.co"
    (tmp_path / ".cache/huggingface").mkdir(parents=True)
    (tmp_path / ".cache/huggingface/token").write_text("hf_kept\n")
    assert model_places({}, tmp_path).token == "hf_kept"
    assert model_places({"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}, tmp_path).token is None
    given = {"HF_HOME": "/h", "HF_ENDPOINT": "https://mirror.example/hf/", "HF_TOKEN": "t", "HF_HUB_OFFLINE": "1"}
    told = model_places({**given, "PENSTOCK_MODELS": "/m", "OLLAMA_MODELS": "/o"}, tmp_path)
    assert (told.hub, told.store, told.ollama) == (Path("/h/hub"), Path("/m"), (Path("/o"),))
    assert (told.endpoint, told.token, told.offline) == ("https://mirror.example/hf", "t", True)
    assert "t'" not in repr(ModelPlaces(Path(), Path(), token="t"))
    for name, value in {"HF_ENDPOINT": "ftp://x", "HF_TOKEN": "a b", "PENSTOCK_REGISTRY": "../x"}.items():
        with pytest.raises(ConfigError, match=name):
            model_places({name: value}, tmp_path)


def texts_of(store: Store, *texts: tuple[str, bytes]) -> Manifest:
    """A manifest of these texts, under the name c."""
    layers = [
        replace(store.add(data, ""), media_type=layer(kind, digest_of(data), 0).media_type) for kind, data in texts
    ]
    manifest = make_manifest(store.add(b"{}", CONFIG), layers)
    store.put(RegistryName("c"), manifest)
    return manifest


def test_texts_are_read_once_and_to_a_bound(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    plain = Path.read_bytes
    same = texts_of(store, *[("license", b"a" * 1000)] * 4000, *[("system", b"b" * 1000)] * 90)
    blobs = store.blobs(same)
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or plain(path))
    assert read_texts(same, blobs).licenses == ("a" * 1000,)
    assert len(read) == 3
    read.clear()
    assert next(entry.name for entry in store.list()) == "c:latest"
    assert len([path for path in read if path.parent.name == "blobs"]) == 1  # the description
    many = texts_of(store, *(("license", b"%d" % number) for number in range(17)))
    large = texts_of(store, *(("license", b"%d" % number * 2**20) for number in range(5)))
    for manifest in (many, large):
        with pytest.raises(CheckpointError, match="texts of"):
            read_texts(manifest, store.blobs(manifest))


@pytest.mark.parametrize(
    "titles",
    [
        ("a/b.json", "a"),
        ("a", "a/b.json"),
        (".complete/x",),
        (".complete",),
        ("a", "a"),
        ("a/" * 10**6 + "a",),
        ("\ud800",),
    ],
)
def test_files_that_cannot_lie_in_one_folder_are_refused(titles: tuple[str, ...]) -> None:
    part = Layer("x", digest_of(b"{}"), 2)
    manifest = make_manifest(part, [replace(part, media_type=FILE, annotations={TITLE: title}) for title in titles])
    with pytest.raises(CheckpointError):
        parse_manifest(manifest.data, "m")


@pytest.mark.parametrize(
    "text", [("params", b'{"stop": ["\\ud800"]}'), ("messages", b'[{"role":"user","content":"\\ud800"}]')]
)
def test_half_a_character_in_a_models_texts_is_told(store: Store, quantised: Path, text: tuple[str, bytes]) -> None:
    ollama_model(store.root, "c", quantised, dict([text]))
    entry = store.find("c")
    assert entry is not None
    with pytest.raises(CheckpointError, match="surrogate"):
        _ = entry.path


def test_what_the_disk_refuses_is_told(store: Store, quantised: Path) -> None:
    ollama_model(store.root, "c", quantised, {})
    entry = store.find("c")
    assert entry is not None
    (store.root / "views").mkdir()
    (store.root / "views" / entry.digest[:32]).write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be laid out"):
        _ = entry.path
