"""LMCache's variables, which vLLM and SGLang read with it: what each is here."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

from penstock.config.errors import ConfigError
from penstock.config.kv_store import store_address

_NUMBER: Final = re.compile(r"\d{1,12}(\.\d{1,12})?")
_SIZES: Final = {"LMCACHE_MAX_LOCAL_CPU_SIZE": "--kv-ram", "LMCACHE_MAX_LOCAL_DISK_SIZE": "--kv-disk"}  # in GB
_SWITCHES: Final = ("LMCACHE_LOCAL_CPU", "LMCACHE_USE_EXPERIMENTAL", "LMCACHE_CHUNK_SIZE", "LMCACHE_REMOTE_SERDE")


def variable(name: str, value: str) -> tuple[list[str], str]:
    """Our flags for a variable, and what is to be said of it."""
    if name in _SIZES and _NUMBER.fullmatch(value):
        words = [_SIZES[name], f"{value}GB"] if float(value) else []
        return words, f"{name}={value} is {' '.join(words)}." if words else f"{name}={value} is left out."
    if name == "LMCACHE_LOCAL_DISK":
        folder = unquote(urlsplit(value).path) if value.startswith("file://") else value
        if not folder.startswith("/"):
            return [], f"{name} is left out: --kv-disk SIZE keeps copies on disk."
        return ["--kv-disk-path", folder], f"{name} is --kv-disk-path {folder}."
    if name == "LMCACHE_REMOTE_URL":
        try:
            store_address(value)
        except ConfigError as error:
            return [], f"{name} is left out: {error}"
        return ["--kv-store", value], f"{name} is --kv-store."
    if name in _SWITCHES:
        return [], f"{name} is not needed: blocks are copied as they are computed, as they are."
    return [], f"{name}: nothing here reads this variable; --kv-ram, --kv-disk and --kv-store keep copies of blocks."
