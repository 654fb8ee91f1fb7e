"""Output that appears under its name only when it is complete."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.config.errors import ConfigError


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def check_replaceable(path: Path) -> None:
    """Raises ConfigError for a path that is no name of its own, and for a folder of other things than a model."""
    if path.name in ("", ".."):
        raise ConfigError(f"--output is {str(path)!r}; give the name of what is to be written there.")
    try:
        strange = path.is_dir() and not (path / "config.json").exists() and any(path.iterdir())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}. Choose another --output.") from None
    if strange:
        raise ConfigError(f"{path} is a folder without a config.json, no model: it is not replaced. Empty it yourself.")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a free path beside `path` to write a file or folder to; it takes the name `path` at the end.

    On an error nothing of it stays, and what lay at `path` is untouched.

    Raises:
        ConfigError: it cannot be written.
    """
    check_replaceable(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if partial.is_dir() and path.exists():
            _remove(path)
        partial.replace(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}. Make room there, or choose another --output."
        ) from error
    finally:
        _remove(partial)
