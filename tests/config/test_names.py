"""A model's name."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.names import served_name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("penstock-concierge", "penstock-concierge"),
        ("/models/Qwen3-0.6B", "Qwen3-0.6B"),
        ("/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("/models/Qwen3-0.6B-Q8_0.gguf", "Qwen3-0.6B-Q8_0"),
        ("models/big-00001-of-00012.gguf", "big"),
        ("/", "model"),
    ],
)
def test_the_name_comes_from_the_path(model: str, name: str) -> None:
    assert served_name(model) == name


def test_a_relative_folder_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    (folder / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(folder)
    assert served_name(".") == served_name("inner/..") == served_name(str(tmp_path / "link")) == "tiny"
    monkeypatch.setenv("HOME", str(folder))
    assert served_name("~") == "tiny"
