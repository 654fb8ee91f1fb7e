"""Penstock beside llama.cpp, OpenVINO GenAI and vLLM's CPU wheel: same shapes, same weight class, same machine.

    python -m benchmarks.cpu.peers install                    # environments of their own, outside the repository
    python -m benchmarks.cpu.peers models --models llama-3.2-1b --formats q4_k_m,q8_0
    python -m benchmarks.cpu.peers measure --models llama-3.2-1b --formats q4_k_m --repeat 5
    python -m benchmarks.cpu.peers serving                    # 16 clients that share a long prefix
    python -m benchmarks.cpu.peers startup                    # process start to first token, peak memory
    python -m benchmarks.cpu.peers --isa avx2 install         # and the other commands: as on a machine with AVX2 alone

Engines take turns, each in its own process, and figures are medians. `measure` keeps what earlier runs on the same
machine found for other models, formats and works. KV caches are each engine's default, and stated.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu import peer_install
from benchmarks.cpu.peer_engines import Run
from benchmarks.cpu.peer_install import Places
from benchmarks.cpu.peer_works import CLASSES, WORKS, merge, parse_work, table
from benchmarks.report import arguments, report

DEFAULT_ROOT = Path.home() / ".cache" / "penstock-peers"
ENGINES = ("penstock", *peer_install.PEERS)


def main() -> None:
    """Runs one of the commands."""
    given = _parser().parse_args()
    command: Callable[[argparse.Namespace], None] = given.run
    command(given)


def _parser() -> argparse.ArgumentParser:
    parser = arguments(__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, help="folder of peers and models")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", choices=tuple(peer_install.LLAMA_ISAS), default="auto", help="hold all engines to it")
    parser.add_argument("--priority", type=int, help="niceness of each engine's scheduling group, -20 to 19")
    parser.add_argument(
        "--penstock",
        action="append",
        metavar="NAME:{JSON}",
        type=named_options,
        help='a Penstock engine and its options, as \'fast:{"dtype": "bfloat16"}\'; may be repeated',
    )
    commands = parser.add_subparsers(required=True)
    installing = commands.add_parser("install", help="install the peers")
    installing.add_argument("--peers", type=_names, default=peer_install.PEERS)
    installing.add_argument("--index", action="append", default=[], help="one more package index (torch's CPU wheels)")
    installing.set_defaults(run=_install)
    making = commands.add_parser("models", help="make the random-weight models")
    making.set_defaults(run=_models)
    measuring = commands.add_parser("measure", help="measure works in turns")
    measuring.add_argument("--works", "--work", type=_names, default=WORKS)
    measuring.add_argument("--repeat", type=int, default=5)
    measuring.set_defaults(run=_measure)
    for command in (making, measuring):
        command.add_argument("--models", type=_names, default=("qwen3-0.6b", "llama-3.2-1b"))
        command.add_argument("--formats", type=_names, default=("q4_k_m",), help=f"of {', '.join(CLASSES)}")
    serving = commands.add_parser("serving", help="16 clients that share a prefix")
    serving.add_argument("--model", default="qwen3-0.6b")
    serving.add_argument("--format", default="q4_k_m")
    serving.add_argument("--repeat", type=int, default=3)
    serving.add_argument("--in-process", action="store_true", help="OpenVINO and vLLM without HTTP")
    serving.set_defaults(run=_serving)
    starting = commands.add_parser("startup", help="process start to first token")
    starting.add_argument("--models", type=_names, default=("qwen3-0.6b", "llama-3.2-1b"))
    starting.add_argument("--format", default="q4_k_m")
    starting.add_argument("--repeat", type=int, default=5)
    starting.set_defaults(run=_startup)
    for command in (measuring, serving, starting):
        command.add_argument("--engines", type=_names, default=ENGINES)
    return parser


def named_options(text: str) -> tuple[str, dict[str, Any]]:
    """A name, which gets "penstock" before it, and options.

    Raises:
        argparse.ArgumentTypeError: not NAME:{JSON object}.
    """
    name, colon, options = text.partition(":")
    try:
        read = json.loads(options) if colon else None
    except json.JSONDecodeError:
        read = None
    if not isinstance(read, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME:{{JSON object}}, for example fast:{{"threads": 2}}.')
    return f"penstock {name}", read


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _name(given: argparse.Namespace, report_name: str) -> str:
    """Of a results file: one an instruction set."""
    return report_name if given.isa == "auto" else f"{report_name}_{given.isa}"


def _setting(given: argparse.Namespace) -> tuple[Run, list[str]]:
    """The run, and the engines in order, "penstock" standing for each Penstock engine."""
    penstock = dict(given.penstock) if given.penstock else {"penstock": {}}
    run = Run(Places(given.root, given.isa), given.threads, given.priority, penstock)
    engines: list[str] = []
    for name in given.engines:
        if name not in ENGINES:
            raise SystemExit(f"unknown engine {name!r}; known: {', '.join(ENGINES)}.")
        if name == "penstock":
            engines += penstock
        elif peer_install.installed(run.places, name):
            engines.append(name)
        else:
            raise SystemExit(f"{name} is not in {given.root}: run the command install, or leave it out of --engines.")
    return run, engines


def _install(given: argparse.Namespace) -> None:
    peer_install.install(Places(given.root, given.isa), given.peers, indexes=given.index, jobs=given.threads)


def _models(given: argparse.Namespace) -> None:
    from benchmarks.cpu.peer_models import SHAPES, make  # needs torch

    for model in given.models:
        make(Places(given.root, given.isa), SHAPES[model], list(given.formats), given.data, given.threads)


def _measure(given: argparse.Namespace) -> None:
    from benchmarks.cpu.peer_measure import measure
    from benchmarks.cpu.peer_plot import plot

    run, engines = _setting(given)
    works = [parse_work(name) for name in given.works]
    file = given.results / f"{_name(given, 'cpu_peers')}.json"
    for model in given.models:
        for kind in given.formats:
            found = measure(run, engines, model, kind, works, given.repeat)
            rows = merge(_earlier(file), found)
            columns, cells = table(found)
            report(file.stem, given.results, {"rows": rows}, columns, cells)
            plot(rows, file.with_suffix(".png"))


def _earlier(file: Path) -> list[dict[str, Any]]:
    """Rows of the results file, if it was written on a CPU of this name."""
    from penstock.cli.doctor import cpu_name

    if not file.exists():
        return []
    read = json.loads(file.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = read["rows"] if read["machine"]["cpu"] == cpu_name() else []
    return rows


def _serving(given: argparse.Namespace) -> None:
    from benchmarks.cpu.peer_serving import columns_and_cells, compare

    run, engines = _setting(given)
    figures = compare(run, engines, given.model, given.format, given.repeat, in_process=given.in_process)
    report(_name(given, "cpu_peers_serving"), given.results, figures, *columns_and_cells(figures))


def _startup(given: argparse.Namespace) -> None:
    from benchmarks.cpu.peer_startup import columns_and_cells, compare

    run, engines = _setting(given)
    figures = compare(run, engines, given.models, given.format, given.repeat)
    report(_name(given, "cpu_peers_startup"), given.results, figures, *columns_and_cells(figures))


if __name__ == "__main__":
    main()
