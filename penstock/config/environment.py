"""The only reader of environment variables. Options on the command line come before these."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.config.errors import ConfigError
from penstock.config.limits import MAX_THREADS
from penstock.config.resolve import ISAS

_NAMES: Final = ("ISA", "THREADS", "LOG_LEVEL", "MODEL", "PACK_CACHE")
_LOG_LEVELS: Final = ("critical", "error", "warning", "info", "debug")


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment asks for; a variable that is unset or empty leaves the default.

    Attributes:
        api_keys: PENSTOCK_API_KEY, separated by commas: keys the server accepts.
        isa: PENSTOCK_ISA: native instruction set to force.
        threads: PENSTOCK_THREADS: threads of native and torch kernels.
        log_level: PENSTOCK_LOG_LEVEL, lower case.
        model: PENSTOCK_MODEL: the model where none is named.
        pack_cache: PENSTOCK_PACK_CACHE: folder of packed weights, or "off".
    """

    api_keys: tuple[str, ...] = ()
    isa: str = "auto"
    threads: int | None = None
    log_level: str = "info"
    model: str | None = None
    pack_cache: str = "auto"


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Reads and checks Penstock's variables.

    Args:
        variables: the environment to read; None reads the process's own.

    Raises:
        ConfigError: a value is not allowed; the message names the variable (and never shows a key).
    """
    given = os.environ if variables is None else variables
    text = {name: given.get(f"PENSTOCK_{name}", "").strip() for name in _NAMES}
    return Environment(
        api_keys=_keys(given.get("PENSTOCK_API_KEY", "")),
        isa=_one_of("PENSTOCK_ISA", text["ISA"], ISAS, "auto"),
        threads=_threads(text["THREADS"]),
        log_level=_one_of("PENSTOCK_LOG_LEVEL", text["LOG_LEVEL"], _LOG_LEVELS, "info"),
        model=_model(text["MODEL"]),
        pack_cache=text["PACK_CACHE"] or "auto",
    )


def _refuse(name: str, shown: str, allowed: str) -> ConfigError:
    return ConfigError(f"{name} is {shown}; allowed: {allowed}. Correct the variable or unset it.")


def _one_of(name: str, value: str, allowed: tuple[str, ...], default: str) -> str:
    lowered = value.lower()
    if lowered and lowered not in allowed:
        raise _refuse(name, repr(value[:80]), ", ".join(allowed))
    return lowered or default


def _threads(value: str) -> int | None:
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 10 and 1 <= int(value) <= MAX_THREADS):
        raise _refuse("PENSTOCK_THREADS", repr(value[:80]), f"a whole number from 1 to {MAX_THREADS}")
    return int(value)


def _model(value: str) -> str | None:
    if "\0" in value or "\n" in value:
        raise _refuse("PENSTOCK_MODEL", repr(value[:80]), "a folder, a .gguf file or a model's name")
    return value or None


def _keys(value: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in value.split(",") if key.strip())
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise _refuse(
                "PENSTOCK_API_KEY", f"unusable in its key number {number}", "printable ASCII without spaces, by commas"
            )
    return keys


def cache_folder() -> Path:
    """Where files that can be made again are kept: $XDG_CACHE_HOME/penstock, ~/.cache/penstock if that is unset."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "penstock"


def pack_folder(setting: str) -> Path | None:
    """Where files of packed weights are kept; `setting` is EngineOptions.pack_cache. None: switched off, or "auto" for
    a user without a home.
    """
    if setting == "off":
        return None
    if setting != "auto":
        return Path(setting).expanduser()
    try:
        return cache_folder() / "packed"
    except RuntimeError:
        return None


def settle_torch() -> None:
    """Sets what torch's libraries read from the environment when they load; call it before torch is imported.

    OpenMP threads sleep at barriers instead of spinning: a spinning team slows down manyfold as soon as anything else
    wants one of its cores, an HTTP process or a browser. oneDNN keeps 64 compiled products instead of 1,024, which is
    hundreds of MiB for a server whose steps differ in their number of rows; compiling one anew costs little. Values the
    user set stay.
    """
    for name, value in (
        ("OMP_WAIT_POLICY", "PASSIVE"),
        ("LRU_CACHE_CAPACITY", "64"),
        ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64"),
    ):
        os.environ.setdefault(name, value)


def bound_torch(threads: int) -> None:
    """The threads torch begins with, should it be loaded later on. A value the user set stays."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def interpret_triton() -> None:
    """Has Triton run its kernels on the CPU, in its interpreter; Triton reads this when it is first imported."""
    os.environ["TRITON_INTERPRET"] = "1"
