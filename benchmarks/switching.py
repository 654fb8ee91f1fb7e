"""How long the switch to another model takes, where only one fits: from the request to its first token.

A real `penstock serve --models` on loopback with the models it is given, in turn, `--rounds` times after a first load
of each. Beside it: the first token of a model that is loaded already, for the same prompt.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import arguments, report
from benchmarks.server_child import ServerChild, serve


def first_token(server: ServerChild, name: str) -> float:
    """Seconds from a request to its only token."""
    began = time.perf_counter()
    body = {"model": name, "prompt": "Hello", "max_tokens": 1}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=600, trust_env=False).raise_for_status()
    return time.perf_counter() - began


def measured(server: ServerChild, names: Sequence[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Of each model, seconds: the first load, every switch to it, and a request to it where it is."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found[name] = {"first_s": first_token(server, name), "switch_s": [], "loaded_s": []}
    for _ in range(rounds):
        for name in names:
            found[name]["switch_s"].append(first_token(server, name))
            found[name]["loaded_s"].append(first_token(server, name))
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Measures and reports."""
    parser = arguments(__doc__)
    parser.add_argument("models", type=Path, nargs="+", help="two or more, of which --memory has room for one")
    parser.add_argument("--memory", required=True, help="the budget, such as 2.5GiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--length", type=int, default=4096, help="the models' context, tokens")
    chosen = parser.parse_args(given)
    if len(chosen.models) < 2:
        parser.error("a switch needs two models")
    names = [f"{number}-{path.stem}" for number, path in enumerate(chosen.models)]
    with tempfile.TemporaryDirectory() as folder:
        lines = ["models:"]
        for name, path in zip(names, chosen.models, strict=True):
            lines.append(f'  "{name}": {{model: "{path.resolve()}", options: {{max_model_len: {chosen.length}}}}}')
        listed = Path(folder, "models.yaml")
        listed.write_text("\n".join(lines), encoding="utf-8")
        with serve(["--models", str(listed), "--memory", chosen.memory, "--pack-cache", f"{folder}/packed"]) as server:
            found = measured(server, names, chosen.rounds)
    rows = [
        (
            name,
            one["first_s"],
            statistics.median(one["switch_s"]),
            max(one["switch_s"]),
            statistics.median(one["loaded_s"]),
        )
        for name, one in found.items()
    ]
    columns = ("model", "first load, s", "switch, s (median)", "switch, s (most)", "loaded, s (median)")
    report("switching", chosen.results, {"memory": chosen.memory, "models": found}, columns, rows)


if __name__ == "__main__":
    main()
