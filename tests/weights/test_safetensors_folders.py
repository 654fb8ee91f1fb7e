"""Hugging Face folders: what is read, and what is refused with a remedy."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.errors import CheckpointError
from penstock.weights.open import bundled_model_path, open_checkpoint
from penstock.weights.readers.safetensors import read_safetensors_file

Folder = Callable[..., Path]
A, B = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int64)


def raw_file(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_single_file_is_viewed_not_copied(folder: Folder) -> None:
    checkpoint = open_checkpoint(folder({"model.safetensors": {"a": A, "b": B}}, generation_config={"top_k": 3}))
    stored = checkpoint.read("a")
    assert (stored.info.shape, stored.info.format, stored.info.nbytes) == ((2, 3), "f32", 24)
    assert np.array_equal(stored.data.view(np.float32).reshape(2, 3), A)
    assert not stored.data.flags.writeable
    assert not stored.data.flags.owndata
    assert checkpoint.tensors["b"].format == "i64"
    assert checkpoint.generation_config == {"top_k": 3}
    assert (checkpoint.tokenizer_config, checkpoint.metadata) == ({}, {})
    with pytest.raises(CheckpointError, match="has no tensor 'c'"):
        checkpoint.read("c")


def test_half_and_byte_floats_need_no_torch(folder: Folder) -> None:
    path = folder({"model.safetensors": {"a": A}})
    header = {
        "x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
        "y": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [4, 8]},
    }
    raw_file(path / "model.safetensors", header, b"\x80\x3f\x00\x40\x38\x38\x38\x38")
    checkpoint = open_checkpoint(path)
    assert [checkpoint.tensors[name].format for name in ("x", "y")] == ["bf16", "f8_e4m3"]
    assert checkpoint.read("x").data.tobytes() == b"\x80\x3f\x00\x40"


def test_shards_under_an_index(folder: Folder) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = {"metadata": {}, "weight_map": {"a": one, "b": two}}
    path = folder({one: {"a": A}, two: {"b": B}}, model__safetensors__index=index)
    checkpoint = open_checkpoint(path)
    assert set(checkpoint.tensors) == {"a", "b"}
    assert np.array_equal(checkpoint.read("b").data.view(np.int64), B)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "z": "gone.safetensors"}, "files that are not there: 'gone.safetensors'"),
        ({"a": "one.safetensors", "z": "one.safetensors"}, "lacks tensors the index promises: 'z'"),
        ({"a": "../one.safetensors"}, "a .safetensors file name without folders is needed"),
        ({"a": "/etc/one.safetensors"}, "a .safetensors file name without folders is needed"),
        ({"a": "sub\\one.safetensors"}, "a .safetensors file name without folders is needed"),
        ({"a": "one.bin"}, "a .safetensors file name without folders is needed"),
        ({"a": 3}, "a .safetensors file name without folders is needed"),
        ({"a": "one.safetensors", "b": "two.safetensors"}, "holds tensors another shard holds as well: 'a'"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_bad_indexes(folder: Folder, weight_map: Any, message: str) -> None:
    files = {"one.safetensors": {"a": A}, "two.safetensors": {"a": A, "b": B}}
    path = folder(files, model__safetensors__index={"weight_map": weight_map})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert message in str(caught.value)


def test_index_with_a_repeated_key(folder: Folder) -> None:
    path = folder({"one.safetensors": {"a": A}, "two.safetensors": {"b": B}})
    text = '{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}'
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="the key 'a' appears twice"):
        open_checkpoint(path)


def test_several_files_without_an_index(folder: Folder) -> None:
    with pytest.raises(CheckpointError, match=r"2 safetensors files but no model\.safetensors\.index\.json"):
        open_checkpoint(folder({"one.safetensors": {"a": A}, "two.safetensors": {"b": B}}))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickles_are_refused_with_the_conversion(folder: Folder, name: str) -> None:
    path = folder({})
    (path / name).write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=r"only pickled weights .*save_pretrained"):
        open_checkpoint(path)
    with pytest.raises(CheckpointError, match="is a pickle, which can run code"):
        open_checkpoint(path / name)


def test_pickles_beside_safetensors_do_not_matter(folder: Folder) -> None:
    path = folder({"model.safetensors": {"a": A}})
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert set(open_checkpoint(path).tensors) == {"a"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        (b"[1]", "holds a list; it must be a JSON object"),
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON: it is nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    ],
)
def test_bad_config(folder: Folder, text: bytes | None, message: str) -> None:
    path = folder({"model.safetensors": {"a": A}})
    (path / "config.json").unlink()
    if text is not None:
        (path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert message in str(caught.value)


def test_symbolic_links_are_followed(folder: Folder, tmp_path: Path) -> None:
    path = folder({"model.safetensors": {"a": A}})
    linked = tmp_path / "snapshot"
    linked.mkdir()
    for file in path.iterdir():
        (linked / file.name).symlink_to(file)
    assert set(open_checkpoint(linked).tensors) == {"a"}
    (linked / "model.safetensors").unlink()
    (linked / "model.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CheckpointError):
        open_checkpoint(linked)


def test_chat_template_from_wherever_it_lies(folder: Folder) -> None:
    path = folder({"model.safetensors": {"a": A}}, tokenizer_config={"chat_template": "inline"})
    assert open_checkpoint(path).tokenizer_config["chat_template"] == "inline"
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(path).tokenizer_config["chat_template"] == {"default": "D", "tool_use": "T"}
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert open_checkpoint(path).tokenizer_config["chat_template"] == "J"
    (path / "chat_template.jinja").write_text("{{ file }}")
    assert open_checkpoint(path).tokenizer_config["chat_template"] == "{{ file }}"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("R")
    assert open_checkpoint(path).tokenizer_config["chat_template"] == {"default": "{{ file }}", "rag": "R"}
    (path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="cannot be read as UTF-8"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234", "no sound safetensors file"),
        ({"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]}}, b"12345678", "no sound"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234", "no sound"),
        ({"a": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}}, b"1234", "no sound"),
        (
            {
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
            },
            b"123456",
            "no sound",
        ),
        ({"a": {"dtype": "U8", "shape": [1] * 9, "data_offsets": [0, 1]}}, b"1", "9 dimensions; at most 8"),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            b"1",
            "",
        ),
        ([], b"", "no sound"),
        (b"", b"", "no sound"),
    ],
)
def test_damaged_files(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_safetensors_file(raw_file(tmp_path / "x.safetensors", header, data))
    assert message in str(caught.value)


def test_oversized_header_length(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for length in (2**63, 2**64 - 1, 100 * 2**20 + 1, 17):
        path.write_bytes(struct.pack("<Q", length) + b"{}" * 4)
        with pytest.raises(CheckpointError, match=f"claims a header of {length} bytes"):
            read_safetensors_file(path)
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="claims a header"):
        read_safetensors_file(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is empty"):
        read_safetensors_file(path)


def test_paths_that_are_no_model(tmp_path: Path, folder: Folder) -> None:
    with pytest.raises(CheckpointError, match=r"there is no model at .*'penstock-concierge'"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"notes\.txt is no model Penstock reads"):
        open_checkpoint(tmp_path / "notes.txt")
    path = folder({"model.safetensors": {"a": A}})
    with pytest.raises(CheckpointError, match="give the folder it lies in"):
        open_checkpoint(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds no weights; looked for model\.safetensors"):
        open_checkpoint(path)


def test_bundled_model_opens_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("penstock-concierge")
    assert checkpoint.path == bundled_model_path()
    assert checkpoint.config["architectures"] == ["Qwen3ForCausalLM"]
    assert "<|im_start|>" in checkpoint.tokenizer_config["chat_template"]


def test_bundled_model_is_the_shared_one(shared_data: Path) -> None:
    source = shared_data / "models/penstock-concierge"
    for file in bundled_model_path().iterdir():
        assert file.read_bytes() == (source / file.name).read_bytes(), file.name
