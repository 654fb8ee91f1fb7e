"""`penstock doctor`: what this machine offers, what Penstock makes of it, and why."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.cli.command import Command, one_of
from penstock.config.environment import pack_folder, read_environment
from penstock.config.errors import CheckpointError
from penstock.config.options import SHORT_TYPES, ServerOptions
from penstock.config.resolve import DTYPES, ISAS

app = typer.Typer(add_completion=False)


@app.command(cls=Command)
def doctor(
    dtype: Annotated[
        str, typer.Option("--dtype", help="The compute type to choose kernels for.", **one_of(DTYPES, SHORT_TYPES))
    ] = "float32",
    isa: Annotated[
        str | None, typer.Option("--isa", help="Force an instruction set. Default: the best.", **one_of(ISAS))
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", help="As in the other commands, or interpreter: kernels of cuda, slowly on a CPU."),
    ] = "auto",
    formats: Annotated[
        bool, typer.Option("--formats", help="Instead, list the weight formats and what becomes of each in memory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what this machine offers and what Penstock makes of it."""
    found = {"formats": examine_formats()} if formats else examine(dtype, isa or read_environment().isa, device)
    if as_json:
        typer.echo(json.dumps(found))
    elif formats:
        _print_formats(found["formats"])
    else:
        _print(found)


def examine_formats() -> list[dict[str, Any]]:
    """Every weight format: its packing, and how many bytes it takes for each in the file.

    Raises:
        ConfigError: the native library, which packs them, cannot be loaded.
    """
    from penstock.startup.format_footprint import format_footprints

    return [
        {"format": r.format, "runs": r.runs, "resident_per_file_byte": round(r.ratio, 3), "packing": r.packed}
        for r in format_footprints()
    ]


def examine(dtype: str = "float32", isa: str = "auto", device: str = "auto") -> dict[str, Any]:
    """Everything that is reported, as plain values; the native library uses `isa` from then on.

    Kernels are told for any device, whether this machine has it or not.

    Raises:
        ConfigError: the compute type, instruction set or device is unknown, or this machine or build lacks the set.
    """
    from penstock.config.options import EngineOptions
    from penstock.config.resolve import auto_device, validate

    validate(EngineOptions(dtype=dtype, isa=isa, device=device))
    from penstock.kernels.api import resolve_kernels
    from penstock.kernels.cpu import native
    from penstock.kernels.registry import KernelContext
    from penstock.startup.engine_spec import kernel_decisions, measure_machine

    machine = measure_machine("auto" if device == "cpu" else device)
    device = auto_device(machine)[0] if device == "auto" else device
    isa = native.select_isa(isa) if native.available() else "none"
    compute = "float32" if dtype == "auto" else dtype
    kernels = resolve_kernels(KernelContext(device.partition(":")[0], compute, isa))
    return {
        "penstock": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": {
            "name": cpu_name(),
            "cores_usable": machine.cores,
            "features": native.cpu_features(),
            "bfloat16": machine.has_bf16,
        },
        "memory": {
            "total_bytes": machine.memory_total,
            "available_bytes": machine.memory_available,
            "huge_pages": huge_pages(),
        },
        "pack_cache": pack_cache_state(read_environment().pack_cache),
        "native_library": {
            "loaded": native.available(),
            "why_not": native.unavailable_reason(),
            "built_for": list(native.built_isas()),
            "usable": list(machine.isas),
            "refused": dict(machine.refused_isas),
            "in_use": isa,
            "fast_differs": native.two_ways(),
        },
        "torch": {"version": importlib.metadata.version("torch")},
        "gpus": [asdict(gpu) for gpu in machine.accelerators],
        "triton": _triton(),
        "other_architectures": _transformers(),
        "kernels": {
            "device": device,
            "dtype": compute,
            "ops": [{"op": d.name, "implementation": d.value, "reason": d.reason} for d in kernel_decisions(kernels)],
        },
        "bundled_model": _bundled_model(),
        "port": port_state(ServerOptions().host, ServerOptions().port),
    }


def _triton() -> dict[str, str | None]:
    """What compiles kernels for GPUs."""
    try:
        return {"version": importlib.metadata.version("triton"), "why_not": None}
    except importlib.metadata.PackageNotFoundError:
        return {"version": None, "why_not": "not installed; pip install 'penstock-llm[gpu]' brings it"}


def _transformers() -> dict[str, str | None]:
    """What becomes of architectures that have no layers here."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        missing = "none without layers here; pip install 'penstock-llm[fallback]' runs others through transformers"
        return {"transformers": None, "runs": missing}
    return {
        "transformers": version,
        "runs": f"those without layers here run through transformers {version}, slowly, on this engine's caches",
    }


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's own name where the system tells it."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def huge_pages() -> dict[str, Any]:
    """Whether weights get huge pages: one is packed, and what the system says of it is read."""
    import numpy as np

    from penstock.kernels.canonical import Plain
    from penstock.kernels.cpu import native, packing

    if not native.available():
        return {"had": False, "why_not": "the native library, which asks for them, is not loaded"}
    rows = 4096  # 16 MiB
    matrix = packing.pack(Plain("f32", (rows, 1024), np.zeros(rows * 4096, dtype=np.uint8)))
    if not matrix.huge_pages:
        return {"had": False, "why_not": "the system knows no transparent huge pages for this process"}
    had = _huge_kilobytes(matrix.data.ctypes.data)
    if had:
        return {"had": True}
    setting = _first_line(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return {"had": False, "why_not": f"asked for and not given; transparent_hugepage/enabled is {setting!r}"}


def _huge_kilobytes(address: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Kilobytes in huge pages of the mapping that holds an address."""
    inside = False
    try:
        for line in smaps.read_text(encoding="utf-8").splitlines():
            area = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
            if area:
                inside = int(area[1], 16) <= address < int(area[2], 16)
            elif inside and line.startswith("AnonHugePages:"):
                return int(line.split()[1])
    except OSError:
        pass
    return 0


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return "not there"


def pack_cache_state(setting: str) -> dict[str, Any]:
    """Where files of packed weights are kept, how many, what they take, and which are of no use.

    `setting` is as in EngineOptions.
    """
    from penstock.weights.pack_cache import damage

    folder = pack_folder(setting)
    if folder is None:
        return {"folder": None, "files": 0, "bytes": 0, "left": {}}
    files = sorted(folder.glob("*.packed")) if folder.is_dir() else []
    left = {file.name: why for file in files if (why := damage(file)) is not None}
    size = sum(file.stat().st_size for file in files)
    return {"folder": str(folder), "files": len(files), "bytes": size, "left": left}


def _bundled_model() -> dict[str, Any]:
    from penstock.weights.open import bundled_model_path

    try:
        return {"present": True, "path": str(bundled_model_path())}
    except CheckpointError as error:
        return {"present": False, "why_not": str(error)}


def port_state(host: str, port: int) -> dict[str, Any]:
    """Whether `penstock serve` could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return {"host": host, "port": port, "free": False, "why_not": error.strerror or str(error)}
    return {"host": host, "port": port, "free": True}


def _print(found: dict[str, Any]) -> None:
    from penstock.cli.terminal import print_table
    from penstock.startup.memory_plan import format_bytes

    cpu = found["cpu"]
    memory = found["memory"]
    native = found["native_library"]
    usable = [name for name, there in cpu["features"].items() if there]
    lacking = [name for name, there in cpu["features"].items() if not there]
    library = f"loaded, uses {native['in_use']} (built for {', '.join(native['built_for'])})"
    level = "differs from" if native["fast_differs"] else "is the same here as"
    model, port = found["bundled_model"], found["port"]
    pages, cache = memory["huge_pages"], found["pack_cache"]
    kept = f"{cache['files']} files, {format_bytes(cache['bytes'])}, in {cache['folder']}; safe to delete"
    rows = (
        ("penstock", f"{found['penstock']} on Python {found['python']} ({sys.executable})"),
        ("system", found["system"]),
        ("processor", f"{cpu['name']}, {cpu['cores_usable']} cores usable"),
        ("features", f"{', '.join(usable) or 'unknown'}" + (f"; not: {', '.join(lacking)}" if lacking else "")),
        ("memory", f"{format_bytes(memory['available_bytes'])} available of {format_bytes(memory['total_bytes'])}"),
        ("huge pages", "given for weights" if pages["had"] else f"not given: {pages['why_not']}"),
        ("packed weights", kept if cache["folder"] else "switched off"),
        *(("", f"{name} will be written anew: {why}") for name, why in cache["left"].items()),
        ("native library", library if native["loaded"] else f"missing: {native['why_not']}"),
        *(("", f"not {name}: {why}") for name, why in native["refused"].items()),
        ("arithmetic", f"--arithmetic fast {level} strict"),
        ("torch", found["torch"]["version"] + ("" if found["gpus"] else ", sees no GPU")),
        *((f"{gpu['kind']}:{gpu['index']}", _gpu(gpu)) for gpu in found["gpus"]),
        ("triton", found["triton"]["version"] or found["triton"]["why_not"]),
        ("other models", found["other_architectures"]["runs"]),
        ("bundled model", f"present at {model['path']}" if model["present"] else f"missing: {model['why_not']}"),
        (f"port {port['port']}", "free" if port["free"] else f"taken: {port['why_not']}; choose another with --port"),
    )
    print_table("Machine", ("", ""), rows)
    kernels = found["kernels"]
    typer.echo()
    print_table(
        f"Kernels for {kernels['dtype']} on {kernels['device']}",
        ("op", "implementation", "why not a better one"),
        [(op["op"], op["implementation"], op["reason"]) for op in kernels["ops"]],
    )


def _gpu(gpu: dict[str, Any]) -> str:
    """One GPU in a line."""
    from penstock.startup.memory_plan import format_bytes

    capability = f", compute capability {'.'.join(map(str, gpu['capability']))}" if gpu["capability"] else ""
    processors = f", {gpu['processors']} multiprocessors" if gpu["processors"] else ""
    lacks = "; ".join(gpu[name] for name in ("no_kernels", "no_bfloat16", "no_fp8") if gpu[name])
    free = f"{format_bytes(gpu['memory_free'])} free of " if gpu["memory_free"] < gpu["memory_total"] else ""
    facts = f"{gpu['name']}, {free}{format_bytes(gpu['memory_total'])}{capability}{processors}"
    return f"{facts}; not: {lacks}" if lacks else facts


def _print_formats(formats: list[dict[str, Any]]) -> None:
    from penstock.cli.terminal import print_table

    print_table(
        "Weight formats; those that take more than 1.1 times their bytes in the file count as converted",
        ("format", "", "memory / file", "packing"),
        [
            (f["format"], "run" if f["runs"] else "converted", f"{f['resident_per_file_byte']:.2f}", f["packing"])
            for f in formats
        ],
    )
