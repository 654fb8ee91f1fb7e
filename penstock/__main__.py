"""`penstock` and `python -m penstock`: the command, or what it lacks."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command."""
    try:
        from penstock.cli.main import main as run
    except ModuleNotFoundError as error:
        if (error.name or "penstock").partition(".")[0] == "penstock":
            raise
        sys.exit(
            f"penstock: the command needs {error.name}, which is not installed; `pip install penstock-llm` brings it. "
            "`from penstock import LLM` does without."
        )
    run()


if __name__ == "__main__":
    main()
