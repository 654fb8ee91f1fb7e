"""What the engine and its kernels reach on a GPU, beside what the card can; no checkpoint and no network is needed.

    python benchmarks/gpu/run.py [--only kernels.linear,model] [--quick] [--out FOLDER]

Prints a table, writes results.json after every figure, and plots. With --device interpreter --tiny it runs through on a
CPU, which says that it works and nothing else. Ends with 1 if an op ran its reference where there is a kernel, else
with 2 if a section failed.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import gc
import importlib
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # in place of this folder, whose modules are named as others are

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
SECTIONS: dict[str, tuple[str, float]] = {  # name → its module, and the seconds it may take; the last may be left out
    "card": ("card", 15),
    "kernels.linear": ("linear", 40),
    "kernels.head": ("linear", 8),
    "kernels.attention": ("attention", 35),
    "kernels.experts": ("experts", 25),
    "kernels.rows": ("rows", 10),
    "kernels.sampling": ("rows", 10),
    "model.llama_8b": ("models", 60),
    "model.llama_8b_fp8": ("models", 60),
    "model.llama_8b_int4": ("models", 20),
    "model.qwen3_0_6b": ("models", 15),
    "model.qwen3_30b_a3b": ("models", 25),
    "model.deepseek_v2_lite": ("models", 20),
    "model.overlap": ("steps", 20),
    "model.invariance": ("steps", 30),
    "model.speculation": ("speculation", 40),
    "model.tiers": ("tiers", 40),
    "model.start": ("start", 40),
    "model.peer": ("peer", 20),
}
ALWAYS = "card"  # others compare with it
COMPILERS = (  # sections whose kernels a process of their own compiles ahead
    "kernels.linear,kernels.head",
    "kernels.attention,kernels.rows",
    "kernels.experts,kernels.sampling",
    "model.llama_8b,model.llama_8b_int4",
    "model.llama_8b_fp8,model.invariance",
    "model.overlap,model.qwen3_0_6b",
    "model.qwen3_30b_a3b,model.deepseek_v2_lite",
    "model.speculation,model.tiers",
)
GRACE = 25.0  # seconds after the last section's end, then a process that hangs is ended


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="sections, or kernels, or model; separated by commas")
    parser.add_argument("--device", default="cuda", choices=("cuda", "interpreter"))
    parser.add_argument("--tiny", action="store_true", help="shapes that say nothing but that it works")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results.json and the plots")
    parser.add_argument("--seconds", type=float, default=505, help="in all; the last sections may be left out")
    parser.add_argument("--compile-only", action="store_true", help="run everything once, so that kernels are compiled")
    parser.add_argument("--no-compilers", action="store_true", help="do not compile ahead in other processes")
    return parser.parse_args(given)


def chosen(only: str, with_card: bool = True) -> list[str]:
    """Sections asked for, in order, with what they compare with. A name stands for all below it too.

    Raises:
        SystemExit: a name fits none.
    """
    wanted = [name for name in only.split(",") if name]
    unknown = [name for name in wanted if not any(_below(section, name) for section in SECTIONS)]
    if unknown:
        raise SystemExit(f"--only names {', '.join(unknown)}; sections are {', '.join(SECTIONS)}.")
    kept = {ALWAYS} if with_card else set()
    return [s for s in SECTIONS if not wanted or s in kept or any(_below(s, name) for name in wanted)]


def _below(section: str, name: str) -> bool:
    return section == name or section.startswith(name + ".")


def compile_ahead(options: argparse.Namespace, sections: list[str]) -> None:
    """Fills Triton's cache of compiled kernels from several processes, as compiling is what takes long."""
    started = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    for names in COMPILERS:
        wanted = ",".join(name for name in names.split(",") if name in sections)
        command = [sys.executable, "-m", "benchmarks.gpu", "--only", wanted, "--compile-only"]
        command += ["--quick"] if options.quick else []
        if wanted:
            running.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    late = 0
    for process in running:
        try:
            process.wait(timeout=max(1.0, 0.2 * options.seconds - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            late += 1
            process.kill()
            process.wait()
    failed = sum(process.returncode != 0 for process in running) - late
    print(
        f"kernels compiled ahead in {time.monotonic() - started:.0f} s; {late} cut short, {failed} failed", flush=True
    )


def figures_of(setting: Any, name: str, limit: float) -> Iterator[Any]:
    """Figures of a section until its time is up; a failure is the last one's note."""
    setting.deadline = time.monotonic() + limit
    module = importlib.import_module(f"benchmarks.gpu.{SECTIONS[name][0]}")
    section = getattr(module, name.rpartition(".")[2])(setting)
    for figure in section:
        yield replace(figure, least=None, most=None) if setting.tiny else figure
        if setting.left <= 0:
            print(f"  … {name} is cut short: its {limit:.0f} s are over", flush=True)
            section.close()
            return


def line(figure: Any) -> str:
    share = "" if figure.share is None else f"{figure.share:7.1%} of {figure.of}"
    bounds = [f"{sign} {value:g}" for sign, value in (("≥", figure.least), ("≤", figure.most)) if value is not None]
    target = f"  target {', '.join(bounds)}: {'met' if figure.met else 'MISSED'}" if bounds else ""
    note = f"  ({figure.note})" if figure.note else ""
    return f"  {figure.name:<48} {figure.value:>12,.4g} {figure.unit:<10}{share}{target}{note}"


def about(setting: Any) -> dict[str, Any]:
    import torch
    import triton

    from penstock import __version__

    found = {
        "penstock": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(0) if setting.on_gpu else setting.device,
    }
    return found | ({"tiny": True} if setting.tiny else {})


def run(
    options: argparse.Namespace, setting: Any, sections: list[str], end: float
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """All figures by section until `end`, and failures; the file is written after each figure."""
    found: dict[str, list[Any]] = {}
    failures: dict[str, str] = {}
    machine = about(setting)
    for name in sections:
        limit = end - time.monotonic() if setting.compiling else min(SECTIONS[name][1], end - time.monotonic())
        if limit <= 0:
            failures[name] = "left out: the time is over"
            continue
        print(f"{name}", flush=True)
        found[name] = []
        try:
            for figure in figures_of(setting, name, limit):
                found[name].append(figure)
                print(line(figure), flush=True)
                write(options.out, setting, machine, found, failures)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
            print(f"  FAILED: {failures[name]}", flush=True)
            traceback.print_exc()
        gc.collect()
        if setting.on_gpu:
            import torch

            torch.cuda.empty_cache()
    write(options.out, setting, machine, found, failures)
    return found, failures


def write(out: Path, setting: Any, machine: Any, found: dict[str, list[Any]], failures: Any) -> None:
    """Writes what there is, unless kernels are only compiled."""
    if setting.compiling:
        return
    sections = {name: [asdict(figure) | {"met": figure.met} for figure in done] for name, done in found.items()}
    everything = {"machine": machine, "sections": sections, "failures": failures, "references": setting.references}
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    end = time.monotonic() + options.seconds
    sections = chosen(options.only, with_card=not options.compile_only)
    if options.device == "interpreter":
        from penstock.config.environment import interpret_triton

        interpret_triton()  # before anything imports triton
    import torch

    from benchmarks.gpu.measure import Setting
    from benchmarks.gpu.plots import bars

    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU; --device interpreter --tiny shows that the command works.")
    setting = Setting(options.device, options.tiny, options.quick, options.compile_only)
    if setting.on_gpu and not options.compile_only and not options.no_compilers:
        compile_ahead(options, sections)
        faulthandler.dump_traceback_later(end - time.monotonic() + GRACE, exit=True)
    found, failures = run(options, setting, sections, end)
    faulthandler.cancel_dump_traceback_later()
    if options.compile_only:
        return 2 if failures else 0
    for name, figures in found.items():
        bars(name, figures, options.out / f"{name}.svg")
    missed = [figure.name for figures in found.values() for figure in figures if figure.met is False]
    print(f"{sum(map(len, found.values()))} figures in {options.out}; targets missed: {'; '.join(missed) or 'none'}")
    for op, why in setting.references.items():
        print(f"the reference ran for {op}, which has a kernel: {why}")
    return 1 if setting.references else 2 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
