"""From nothing to the first token of one prompt, with an engine's Python class; ends as soon as it has been said.

Arguments: the engine's module in this package, and its setup with `prompt`, token ids.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main() -> None:
    """Loads, continues the prompt by one token, and says so on standard output."""
    said = os.dup(1)
    os.dup2(2, 1)  # libraries print
    setup = json.loads(sys.argv[2])
    run, _ = importlib.import_module(f"benchmarks.cpu.workers.{sys.argv[1]}").load(setup)
    _, tokens = run([setup["prompt"]], 1)
    os.write(said, f"{len(tokens[0])}\n".encode())
    os._exit(0)  # what follows is not start-up


if __name__ == "__main__":
    main()
