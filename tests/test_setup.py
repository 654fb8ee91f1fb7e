"""Setting up: what serving needs is installed for serving, and every wait is seen."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEP = ROOT / ".ci" / "step.py"
UNTIL_SEEN = """
import os, sys, time
while len(sys.argv) > 1 and not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
PIP = (
    """
for line in ("Collecting torch==9", "  Downloading torch-9.0+cpu-cp311-cp311-linux.whl (187.4 MB)",
             "Progress 1000000 of 187400000", "Progress 93700000 of 187400000"):
    print(line, flush=True)
"""
    + UNTIL_SEEN
)
NINJA = (
    """
print("*** Configuring CMake...", flush=True)
print("[7/134] Building CXX object CMakeFiles/penstock_avx2.dir/csrc/ops/linear.cpp.o", flush=True)
"""
    + UNTIL_SEEN
)


def planned(target: str, tmp_path: Path) -> str:
    """What make would do for a target in a fresh checkout."""
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    for name in ("Makefile", "pyproject.toml", "CMakeLists.txt", "requirements", "csrc", ".ci"):
        (fresh / name).symlink_to(ROOT / name)
    command = ["make", "--dry-run", "--no-print-directory", target]
    return subprocess.run(command, cwd=fresh, capture_output=True, text=True, check=True, timeout=60).stdout


def test_serving_needs_only_what_serving_needs(tmp_path: Path) -> None:
    steps = planned("serve", tmp_path)
    assert "requirements/runtime.txt" in steps and "penstock serve" in steps
    assert "dev.txt" not in steps and "clients.txt" not in steps
    names = {line.split("==")[0] for line in (ROOT / "requirements" / "runtime.txt").read_text().lower().splitlines()}
    assert not names & {"triton", "transformers", "mypy", "pytest", "openai"}


def test_tests_add_what_they_need(tmp_path: Path) -> None:
    steps = planned("test", tmp_path)
    assert "requirements/dev.txt" in steps and "requirements/clients.txt" in steps


def on_terminal(code: str, *given: str, status: int = 0, expected: str = "") -> str:
    """What a step shows a person; with a path `given`, that is made when what is expected has been shown."""
    primary, secondary = pty.openpty()
    command = [sys.executable, str(STEP), "step", sys.executable, "-c", code, *given]
    with subprocess.Popen(command, stdout=secondary, stderr=secondary, env={**os.environ, "COLUMNS": "80"}) as process:
        seen, ended = b"", False
        while not ended:  # what was written before the end is still there to be read
            ended = process.poll() is not None
            while select.select([primary], [], [], 0.1)[0]:
                seen += os.read(primary, 4096)
                if given and expected.encode() in seen:
                    Path(given[0]).touch()
        assert process.returncode == status
    os.close(secondary)
    os.close(primary)
    return seen.decode()


@pytest.mark.parametrize(
    ("code", "shown"), [(PIP, "torch-9.0+cpu 94 of 187 MB"), (NINJA, "7/134 linear.cpp.o")], ids=["pip", "ninja"]
)
def test_a_step_shows_how_far_it_is(code: str, shown: str, tmp_path: Path) -> None:
    seen = on_terminal(code, str(tmp_path / "seen"), expected=shown)
    assert shown in seen
    assert "step: done in " in seen.splitlines()[-1]


def test_a_step_that_fails_shows_what_was_said() -> None:
    seen = on_terminal("print('the reason'); raise SystemExit(3)", status=3)
    assert "step: failed in " in seen
    assert "the reason" in seen
