"""`penstock.LLM` runs without the server's libraries and without the native one, as on a GPU machine that is lent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("offline_program.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def said_by(*arguments: str) -> dict[str, Any]:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said["others"] == []
    return said


def test_the_library_does_all_it_can_without_what_is_not_installed() -> None:
    said = said_by("everything", "penstock-concierge")
    assert {kernel.split()[0] for kernel in said["kernels"]} <= {"reference", "oneDNN"}
    assert said["chat"]
    assert said["parsed"] == 4
    assert said["logprobs"] == [3, 3] and said["prompt_logprobs"] == 2
    whole, stopped = said["stop"]
    assert whole.startswith(stopped) and len(stopped) <= 2
    assert said["beams"] == 2
    assert said["embedding"] > 0
    assert said["program"][0] and said["program"][1] in ("x", "y")
    assert said["grammar"].startswith("structured output needs llguidance") and "pip install" in said["grammar"]


@pytest.mark.parametrize("device", ["cpu", "interpreter"])
def test_answers_are_the_same(shared_data: Path, device: str) -> None:
    if device == "interpreter" and find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    folder = shared_data / "models" / "stories260K"
    said = said_by(device, str(folder / "hf"))
    assert said["ids"] == json.loads((folder / "greedy.json").read_text())["greedy_ids"][:4]
    kind = "triton" if device == "interpreter" else "reference"
    assert any(kernel.startswith(kind) for kernel in said["kernels"])
    assert not any(kernel.startswith("native") for kernel in said["kernels"])


def test_the_command_says_what_it_lacks() -> None:
    done = run("command")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "penstock: the command needs typer, which is not installed; `pip install penstock-llm` brings it. "
        "`from penstock import LLM` does without."
    ]
