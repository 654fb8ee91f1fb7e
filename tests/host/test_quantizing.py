"""Quantising in a process of its own: told, behind everything else, and gone when nobody wants it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from penstock.config.errors import CheckpointError, ConfigError, PenstockError
from penstock.host.quantizing import NICENESS, quantize_apart
from penstock.weights.open import bundled_model_path, open_checkpoint


def working() -> list[psutil.Process]:
    """The processes that quantise now; one may end at any time."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE and "penstock.host.quantizing" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_a_copy_is_written_behind_everything_else_and_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    pids: list[int] = []
    niceness: list[int] = []

    def tell(done: int, total: int) -> None:
        told.append((done, total))
        niceness.extend(os.getpriority(os.PRIO_PROCESS, pid) for pid in pids)  # also of one that just ended

    def check() -> None:
        if not pids:
            pids.extend(child.pid for child in working())

    output = tmp_path / "small.gguf"
    quantize_apart(bundled_model_path(), "q8_0", output, tell, check)
    assert open_checkpoint(str(output)).metadata
    assert told == sorted(told) and told[-1][0] == told[-1][1] > 0
    assert len(pids) == 1 and set(niceness) == {min(19, os.nice(0) + NICENESS)}
    assert working() == []


def test_who_wants_it_no_more_ends_it(tmp_path: Path) -> None:
    class LeftError(PenstockError):
        pass

    calls: list[int] = []

    def check() -> None:
        calls.append(len(working()))
        for child in working():
            child.suspend()  # it is not over before the third look
        if len(calls) == 3:
            raise LeftError

    with pytest.raises(LeftError):
        quantize_apart(bundled_model_path(), "q8_0", tmp_path / "small.gguf", lambda done, total: None, check)
    assert calls == [1, 1, 1] and working() == []


def test_what_is_wrong_is_told_as_what_it_is(tmp_path: Path) -> None:
    def quantise(model: Path, format: str) -> None:
        quantize_apart(model, format, tmp_path / "small.gguf", lambda done, total: None, lambda: None)

    with pytest.raises((CheckpointError, ConfigError), match="nowhere"):
        quantise(tmp_path / "nowhere", "q8_0")
    with pytest.raises(ConfigError, match="allowed"):
        quantise(bundled_model_path(), "q99")
    assert working() == []


def test_a_process_that_is_killed_is_a_sentence(tmp_path: Path) -> None:
    def check() -> None:
        for child in working():
            with contextlib.suppress(psutil.Error):
                child.kill()

    with pytest.raises(PenstockError, match="could not be quantised: that process ended with signal 9"):
        quantize_apart(bundled_model_path(), "q8_0", tmp_path / "small.gguf", lambda done, total: None, check)


def test_it_ends_with_who_started_it() -> None:
    program = "import time; from penstock.host.quantizing import end_with_parent; end_with_parent(); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 1
