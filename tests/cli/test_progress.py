"""Whoever waits at a terminal sees what for, from the first moment on; a pipe gets none of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.library.make import manifest_of
from penstock.library.store import open_store
from penstock.weights.open import bundled_model_path
from tests.cli.conftest import Penstock
from tests.cli.screen import Terminal

BUNDLED = "penstock-concierge"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (
            ["perplexity", BUNDLED, "--text", "text.txt", "--context", "64", "--against", BUNDLED],
            ["Reading the text", "Starting the engine", "Scoring"],
        ),
        (
            ["imatrix", BUNDLED, "--text", "text.txt", "-o", "matrix.gguf", "--context", "64"],
            ["Reading the text", "Starting the engine", "Running over the text"],
        ),
        (["quantize", BUNDLED, "--to", "q8_0", "-o", "small.gguf"], ["Reading the model", "Quantising"]),
        (["convert", BUNDLED, "-o", "whole.gguf"], ["Reading the model", "Converting"]),
        (["import", str(bundled_model_path()), "mine"], ["Reading the model", "Importing"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_every_wait_says_what_for(
    arguments: list[str], shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    Path("text.txt").write_text("I am looking for a place to eat in San Jose, please.\n" * 40, encoding="utf-8")
    terminal = Terminal(*arguments, home=tmp_path, columns=120)
    try:
        for text in shown:
            terminal.expect_raw(text.encode())
        assert terminal.ended() == 0
    finally:
        terminal.close()


def test_a_pipe_gets_the_figures_alone(penstock: Penstock, tmp_path: Path) -> None:
    written = penstock("quantize", BUNDLED, "--to", "q8_0", "-o", str(tmp_path / "small.gguf"))
    assert written.returncode == 0
    assert written.stdout.startswith(str(tmp_path / "small.gguf")) and len(written.stdout.splitlines()) == 1
    assert "Reading" not in written.stderr


def test_a_large_file_is_told_in_pieces(tmp_path: Path) -> None:
    told = list[tuple[int, int]]()
    manifest_of(open_store(tmp_path), bundled_model_path(), lambda done, total: told.append((done, total)))
    files = [path for path in bundled_model_path().iterdir() if path.is_file()]
    assert len(told) > len(files)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] == {total for _, total in told}.pop()
