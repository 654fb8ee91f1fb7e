#!/usr/bin/env python3
"""Runs one step of a set-up and shows how far it is: what pip loads and installs, what is compiled, and the seconds.

.ci/step.py TITLE COMMAND…    a line that is rewritten on a terminal, elsewhere a line every few seconds

What the command said is shown if it fails. The exit status is the command's.
"""

from __future__ import annotations

import queue
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

EVERY_S = 5.0  # between lines where nothing can be rewritten
TICK_S = 0.25
LAST_LINES = 60  # shown of a failure
_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")  # pip --progress-bar raw
_COMPILED = re.compile(r"\[(\d+/\d+)\] (?:Building \w+ object )?(?:CMakeFiles/)?(\S+)")
_LOADED = re.compile(r"(?:Downloading|Using cached|Collecting|Processing) (\S+)(?: \((.*)\))?")
_INSTALLED = re.compile(r"Installing collected packages: (.*)")
_CONFIGURED = re.compile(r"\*\*\* (.*)")


class Progress:
    """What a command is at, told from its lines."""

    def __init__(self) -> None:
        self._now = ""
        self._size = ""
        self._wanted = self._before = 0

    def read(self, line: str) -> None:
        """Takes a line of the command's."""
        if found := _PROGRESS.search(line):
            done, total = (int(count) / 1e6 for count in found.groups())
            self._size = f" {done:.0f} of {total:.0f} MB"
        elif found := _COMPILED.search(line):
            self._now, self._size = f"{found[1]} {Path(found[2]).name}", ""
        elif found := _INSTALLED.search(line):
            self._wanted, self._before = found[1].count(",") + 1, _installed()
        elif found := _LOADED.match(line.strip()):
            name = found[1].rpartition("/")[2].partition("-cp")[0].partition("-py")[0]
            self._now, self._size = name, f" ({found[2]})" if found[2] and found[2][0].isdigit() else ""
        elif found := _CONFIGURED.search(line):
            self._now, self._size = found[1].rstrip("."), ""

    def told(self) -> str:
        """A few words."""
        if self._wanted:
            return f"installing, {min(self._wanted, max(0, _installed() - self._before))} of {self._wanted} packages"
        return self._now + self._size


def _installed() -> int:
    return sum(1 for _ in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))


def _read(stream: object, lines: queue.Queue[str | None]) -> None:
    for line in stream:  # type: ignore[attr-defined]
        lines.put(line.rstrip())
    lines.put(None)


def run(title: str, command: list[str]) -> int:
    """Runs the command; its exit status."""
    began = shown = time.monotonic()
    rewrite = sys.stdout.isatty()
    lines: queue.Queue[str | None] = queue.Queue()
    said: list[str] = []
    progress = Progress()

    def show(text: str, *, last: bool = False) -> None:
        line = f"{title}: {text}"
        if rewrite:
            line = "\r" + line[: shutil.get_terminal_size().columns - 1] + "\x1b[K" + ("\n" if last else "")
        print(line, end="" if rewrite else "\n", flush=True)

    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, errors="replace"
    )
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    show("…")
    try:
        while True:
            try:
                line = lines.get(timeout=TICK_S)
                if line is None:
                    break
                said.append(line)
                progress.read(line)
            except queue.Empty:
                pass
            now = time.monotonic()
            if now - shown >= (TICK_S if rewrite else EVERY_S):
                shown = now
                show(f"{now - began:.0f} s  {progress.told()}")
        status = process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        show("stopped", last=True)
        return 130
    show(f"{'done' if status == 0 else 'failed'} in {time.monotonic() - began:.0f} s", last=True)
    if status:
        print("\n".join(said[-LAST_LINES:]), file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
