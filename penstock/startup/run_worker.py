"""Starts a rank's process. No torch here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

# With this very package, never a module of the current directory. A terminal's Ctrl-C is for the one that leads.
PROGRAM: Final = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path.append(sys.argv[1]); "
    "runpy.run_module('penstock.startup.worker_process', None, '__main__')"
)


def run_worker(ends: Mapping[str, object], passed: Sequence[int]) -> subprocess.Popen[bytes]:
    """Starts a process with `worker_process.Ends`, and hands these descriptors over.

    Raises:
        OSError: it cannot be started.
    """
    words = [str(Path(__file__).resolve().parents[2]), json.dumps(ends)]
    command = [sys.executable, "-P", "-c", PROGRAM, *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=passed)
