"""What a GGUF file says of text is kept beside its packed weights, and not trusted where it is another's or damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.config import code
from penstock.engine.text_pipeline import TextPipeline
from penstock.kernels.cpu import native
from penstock.weights import kept_text
from penstock.weights.open import open_description
from penstock.weights.writers.quantize import quantize_model

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
MESSAGES = [{"role": "user", "content": "A table for two in San José, at 7:30 pm?"}]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(kept_text, "SMALLEST", 1)
    path = tmp_path / "m.gguf"
    quantize_model("penstock-concierge", "q8_0", path)
    return path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models whose files were read."""
    found: list[str] = []
    really = open_description

    def noting(path: str) -> object:
        found.append(path)
        return really(path)

    monkeypatch.setattr("penstock.weights.kept_text.described", noting)
    return found


def same(one: TextPipeline, other: TextPipeline) -> bool:
    assert one.template is not None and other.template is not None
    prompt = one.template.render(MESSAGES)
    ids = one.tokenizer.encode(prompt)
    return (
        prompt == other.template.render(MESSAGES)
        and ids == other.tokenizer.encode(prompt)
        and one.tokenizer.decode(ids) == other.tokenizer.decode(ids)
        and (one.eos_ids, one.vocab_size, one.defaults) == (other.eos_ids, other.vocab_size, other.defaults)
        and (one.pooling, one.answers, one.mark_ids) == (other.pooling, other.answers, other.mark_ids)
    )


def test_the_second_start_does_not_read_the_model(model: Path, tmp_path: Path, opened: list[str]) -> None:
    cache = str(tmp_path / "cache")
    truth = TextPipeline.load(str(model))
    first = TextPipeline.load(str(model), cache=cache)
    assert len(opened) == 2
    second = TextPipeline.load(str(model), cache=cache)
    assert len(opened) == 2
    assert same(first, truth)
    assert same(second, truth)  # and builds what encodes text now
    assert len(opened) == 3


def test_a_small_vocabulary_is_not_kept(
    model: Path, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_text, "SMALLEST", 5000)
    for _ in range(2):
        TextPipeline.load(str(model), cache=str(tmp_path / "cache"))
    assert len(opened) == 2
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "another model", "other code"])
def test_what_cannot_be_used_is_written_anew(
    damage: str, model: Path, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    truth = TextPipeline.load(str(model), cache=str(cache))
    (file,) = cache.glob("*.text")
    data = bytearray(file.read_bytes())
    if damage == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "other code":
        monkeypatch.setattr(code, "code_state", lambda: (("changed.py", 1, 2),))
    else:
        os.utime(model, ns=(1, 1))
    opened.clear()
    assert same(TextPipeline.load(str(model), cache=str(cache)), truth)
    assert opened == [str(model)]
    TextPipeline.load(str(model), cache=str(cache))
    assert opened == [str(model)]


def test_a_folder_that_cannot_be_written_is_no_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    assert same(TextPipeline.load(str(model), cache=str(tmp_path / "taken")), TextPipeline.load(str(model)))
