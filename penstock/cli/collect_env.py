"""`penstock collect-env`: what a bug report needs, in one block to paste, without secrets."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.cli.command import Command
from penstock.config.environment import model_places, pack_folder, read_environment, told_variables

app = typer.Typer(add_completion=False)
PACKAGES: Final = (
    *(
        "cryptography",
        "fastapi",
        "httptools",
        "httpx",
        "httpx2",
        "huggingface_hub",
        "jinja2",
        "llguidance",
        "matplotlib",
    ),
    *("minio", "msgspec", "nanobind-backend", "numpy", "prometheus_client", "prompt_toolkit", "pyyaml", "pyzmq"),
    *("redis", "rich", "safetensors", "tokenizers", "torch", "transformers", "triton", "typer", "uvicorn", "uvloop"),
    "websockets",
)
"""Whose versions are told: what Penstock needs, and what it uses where that is there."""


@app.command("collect-env", cls=Command)
def collect_env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print what a bug report needs: versions, processor, instruction sets, memory, packages, settings. No secrets."""
    found = collect()
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    for title, section in found.items():
        typer.echo(f"## {title}")
        for line in _lines(section):
            typer.echo(line)
        typer.echo("")


def collect() -> dict[str, Any]:
    """All sections; one that cannot be had says why, since what is broken here may be what is reported."""
    sections: dict[str, Callable[[], Any]] = {
        "versions": _versions,
        "machine": _machine,
        "kernels": _kernels,
        "packages": _packages,
        "settings": _settings,
        "variables": told_variables,
    }
    told: dict[str, Any] = {}
    for title, make in sections.items():
        try:
            told[title] = make()
        except Exception as error:  # also of libraries that do not load
            told[title] = {"failed": f"{type(error).__name__}: {error}"}
    return _without_home(told)


def _versions() -> dict[str, Any]:
    from penstock import __version__
    from penstock.config.arithmetic import ARITHMETIC_VERSION

    return {
        "penstock": __version__,
        "arithmetic": ARITHMETIC_VERSION,
        "python": sys.version.replace("\n", " "),
        "system": platform.platform(),
        "distribution": _distribution(),
        "libc": " ".join(platform.libc_ver()),
    }


def _distribution() -> str:
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    return ""


def _machine() -> dict[str, Any]:
    from penstock.cli.doctor import cpu_name
    from penstock.kernels.cpu import native
    from penstock.startup.header_plan import this_machine
    from penstock.startup.memory_plan import format_bytes

    machine = this_machine()
    features = native.cpu_features()
    return {
        "processor": cpu_name(),
        "cores usable": machine.cores,
        "memory": f"{format_bytes(machine.memory_available)} available of {format_bytes(machine.memory_total)}",
        "features": [name for name, there in features.items() if there],
        "lacks": [name for name, there in features.items() if not there],
    }


def _kernels() -> dict[str, Any]:
    from penstock.cli.doctor import examine

    found = examine(isa=read_environment().isa)
    ops = found["kernels"]["ops"]
    return {
        "native library": found["native_library"],
        "huge pages": found["memory"]["huge_pages"],
        "GPUs": found["gpus"],
        "reference alone": [op["op"] for op in ops if op["implementation"] == "reference"],
    }


def _packages() -> dict[str, str]:
    found = dict[str, str]()
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _settings() -> dict[str, Any]:
    environment, places = read_environment(), model_places()
    packed = pack_folder(environment.pack_cache)
    return {
        "api keys": f"{len(environment.api_keys)} set",
        "isa": environment.isa,
        "threads": environment.threads,
        "log level": environment.log_level,
        "log format": environment.log_format,
        "model": environment.model,
        "packed weights": None if packed is None else str(packed),
        "models": str(places.store),
        "Hugging Face cache": str(places.hub),
        "hub": places.endpoint,
        "hub token": "set" if places.token else "not set",
        "offline": places.offline,
        "registry": places.registry,
    }


def _without_home(told: dict[str, Any]) -> dict[str, Any]:
    """Paths begin with ~: the name of a user is nobody's business."""
    with suppress(RuntimeError):
        home = str(Path.home())
        if len(home) > 1:
            text = json.dumps(told, ensure_ascii=False).replace(json.dumps(home, ensure_ascii=False)[1:-1], "~")
            return dict(json.loads(text))
    return told


def _lines(found: Any, depth: int = 0) -> Iterator[str]:
    """Values below one another, with their names."""
    for name, value in found.items():
        if isinstance(value, Mapping) and value:
            yield f"{'  ' * depth}{name}:"
            yield from _lines(value, depth + 1)
        else:
            yield f"{'  ' * depth}{name}: {_shown(value)}"


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(item if isinstance(item, str) else json.dumps(item) for item in value) or "none"
    return "none" if value in (None, "", {}) else str(value)
