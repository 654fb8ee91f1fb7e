"""The manual page, and what shells complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import COMMANDS, commands_of
from penstock.cli.man import _text, manual_page

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_that_is_installed_is_the_commands_own() -> None:
    """After a change: penstock man > man/penstock.1."""
    assert (ROOT / "man" / "penstock.1").read_text(encoding="utf-8") == manual_page()


def test_it_has_every_command_and_flag() -> None:
    page = manual_page()
    for name, _ in COMMANDS:
        assert rf"\fB{_text(name)}" in page
    flags = {spelling for command in commands_of() for parameter in command.params for spelling in parameter.opts}
    assert {flag for flag in flags if flag.startswith("--") and _text(flag) not in page} == set()


def test_nothing_in_it_is_taken_for_a_request() -> None:
    assert _text(".so x") == r"\&.so x" and _text("'a") == r"\&'a" and _text("a\\-b") == r"a\e\-b"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_finds_no_fault_in_it() -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Kutf8", "-Tutf8", "-z"],
        input=manual_page().encode(),
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers at the end of a line."""
    environment = {
        **os.environ,
        "_PENSTOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - (0 if line.endswith(" ") else 1)),
        "PENSTOCK_MODELS": str(folder / "store"),
        "HF_HOME": str(folder / "hf"),
        "OLLAMA_MODELS": str(folder / "ollama"),
    }
    done = subprocess.run(
        [sys.executable, "-c", "from penstock.cli.main import main; main()"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("penstock run pen", ["penstock-concierge"]),
        ("penstock rm pen", ["penstock-concierge"]),
        ("penstock rm else", []),
        ("penstock serve --isa avx2", ["avx2"]),
        ("penstock serve --reasoning-parser qwen", ["qwen3"]),
        ("penstock config show perp", ["perplexity"]),
        ("penstock bench sw", ["sweep"]),
    ],
)
def test_values_are_completed(line: str, offered: list[str], tmp_path: Path) -> None:
    assert completed(line, tmp_path) == offered
