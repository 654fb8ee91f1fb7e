"""Every code block of the documentation does what the page says, and prints what stands below it.

Blocks of Python run as they are, blocks of commands line by line, in a folder that has what they name: MODEL, FILE and
the like. A server runs where they expect one. What cannot run here says so in a comment before it.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import PAGES, ROOT, Block, agrees, blocks, indented

BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in BLOCKS if block.language in ("python", "bash") and block.not_run is None]
DATA = {"text", "ini", "toml", "yaml"}
COMMAND = re.compile(r"^ *(?:\$ )?(?:penstock|pip|python|pytest|make|curl|docker|from|import|with) ", re.MULTILINE)
MODEL = ROOT / "penstock" / "models_data" / "penstock-concierge"
REASONS = (
    "needs a GPU",
    "needs models of your own",
    "needs a network",
    "needs Docker",
    "sets up a machine",
    "runs tests",
    "is part of a file",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the blocks run: what they name lies there."""
    home = tmp_path_factory.mktemp("documented")
    for name in ("MODEL", "OTHER", "models/Qwen3-0.6B"):
        (home / name).parent.mkdir(exist_ok=True)
        shutil.copytree(MODEL, home / name)
    text = "I am looking for a place to eat in San Jose. I would like Italian food, please.\n" * 60
    for name in ("FILE", "report.txt"):
        (home / name).write_text(text, encoding="utf-8")
    commands = home / "bin"
    commands.mkdir()
    (commands / "penstock").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock "$@"\n')
    (commands / "penstock").chmod(0o755)
    return home


def environment(folder: Path) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{clean['PATH']}"
    return {
        **clean, "HOME": str(folder), "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1",
    }  # fmt: skip


def started(folder: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A server that answers, and its URL."""
    command = [sys.executable, "-m", "penstock", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, env=environment(folder), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        url = url or "".join(re.findall(r"http://[\d.]+:\d+", line))
        if line.startswith("Ready"):
            return process, url
    raise AssertionError(f"the server ended: {process.wait()}")


def stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    """A server of the bundled model."""
    process, found = started(folder, MODEL.name)  # a server of the library would hold what `cache rm` removes
    yield found
    stopped(process)


def lines(block: Block) -> list[str]:
    """The commands of a block, without remarks."""
    joined = block.text.replace("\\\n", " ")
    return [line for line in (re.sub(r" {2,}#.*$|^#.*$", "", text).rstrip() for text in joined.splitlines()) if line]


def run_command(line: str, folder: Path) -> str:
    if line.startswith("penstock serve"):
        process, _ = started(folder, *re.sub(r"~", str(folder), line).removesuffix("&").split()[2:])
        stopped(process)
        return ""
    done = subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=100,
        input="I am looking for a place to eat.\n" if line.strip() == "penstock run" else "",
    )  # fmt: skip
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("block", RUN, ids=[block.name for block in RUN])
def test_a_block_does_and_prints_what_the_page_says(block: Block, folder: Path, url: str) -> None:
    block_text = block.text.replace("http://127.0.0.1:8000", url)
    if block.language == "python":
        done = subprocess.run(
            [sys.executable, "-W", "error::SyntaxWarning", "-c", block_text], cwd=folder, env=environment(folder),
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said = done.stdout
        assert block.printed is not None or not said, f"what it prints is not shown: {said}"
    else:
        if "curl " in block.text and shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        here = [line.replace("http://127.0.0.1:8000", url) for line in lines(block)]
        said = "".join(run_command(line, folder) for line in here)
    if block.printed is not None:
        assert agrees(said, block.printed), said


def test_what_is_not_run_is_listed_with_a_reason() -> None:
    """No block is left out silently: those that are, need what a test cannot count on."""
    wrong = [b.name for b in BLOCKS if b.not_run is not None and not b.not_run.startswith(REASONS)]
    assert wrong == []
    assert [b.name for b in BLOCKS if b.language not in {"python", "bash", *DATA}] == []
    left_out = {b.page for b in BLOCKS if b.not_run is not None}
    assert left_out <= {
        "README.md",
        "CONTRIBUTING.md",
        "adapters.md",
        "adding-a-model.md",
        "deploy.md",
        "gpu.md",
        "host.md",
        "kv-tiers.md",
        "library.md",
        "llama-server.md",
        "operations.md",
        "parallel.md",
        "terminal.md",
        "vllm.md",
    }


def test_commands_stand_between_fences() -> None:
    """An indented block is a picture: what a person may type is run."""
    found = [(page.name, text) for page in PAGES for text in indented(page) if COMMAND.search(text)]
    assert found == []


def test_dots_stand_for_anything() -> None:
    assert agrees('{"id": "a1", "x": 2}\n', '{"id": "…", "x": 2}')
    assert not agrees('{"id": "a1", "x": 3}', '{"id": "…", "x": 2}')
    assert not agrees("a\nb", "a")
