"""Cold start: `penstock --help`, and process start to the first 200 of /readyz with the bundled model.

Files are in the page cache after the first run; every run is a new process. Also checked, not timed: torch is absent
from `penstock --help`, from `import penstock` and from the process that speaks HTTP.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.report import arguments, report
from benchmarks.server_child import maps_torch, serve

_HELP = "import sys; from penstock.cli.main import app; app(['--help'], standalone_mode=False)"
_IMPORT = "import sys, penstock"
_VERDICT = "; sys.exit('torch was imported' if 'torch' in sys.modules else 0)"


def time_help() -> float:
    """Seconds of one `penstock --help`."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "penstock.cli.main", "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def time_ready() -> float:
    """Seconds until one server is ready.

    Raises:
        AssertionError: its HTTP process has torch in its memory.
    """
    with serve() as server:
        if maps_torch(server.http.pid):
            raise AssertionError("the HTTP process has loaded torch")
        return server.ready_s


def check_imports() -> None:
    """Raises CalledProcessError if the help or the bare import loads torch."""
    for code in (_HELP, _IMPORT):
        subprocess.run([sys.executable, "-c", code + _VERDICT], check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Measures both, alternating."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    check_imports()
    time_help()
    helps, readies = [], []
    for _ in range(given.runs):
        helps.append(time_help())
        readies.append(time_ready())
    figures: dict[str, Any] = {
        what: {"median_s": statistics.median(found), "runs_s": found}
        for what, found in (("help", helps), ("server_ready", readies))
    }
    rows = [(what, found["median_s"], min(found["runs_s"]), max(found["runs_s"])) for what, found in figures.items()]
    report("startup", given.results, figures, ("what", "median, s", "least, s", "most, s"), rows)
    print("\ntorch is absent from --help, import penstock and the HTTP process")


if __name__ == "__main__":
    main()
