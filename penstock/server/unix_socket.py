"""A Unix socket instead of an address: made where no other server listens, and gone when the server has ended."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress

from penstock.config import limits
from penstock.config.errors import ConfigError


def bind_unix(path: str, *, private: bool) -> socket.socket:
    """A listening socket at a path. One that an ended server has left there is replaced.

    Args:
        private: this user alone may connect.

    Raises:
        ConfigError: a server listens there, something that is no socket is there, or none can be made.
    """
    refused = f"cannot listen on the socket {path!r}"
    if not path or path.startswith("\0"):  # what the kernel would name by itself, and anybody could connect to
        raise ConfigError(f"{refused}: that is no path of a file. Name one (--uds) in a folder this user may write.")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _make_room(path, refused)
        before = os.umask(0o177 if private else 0o111)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        listener.listen(limits.LISTEN_BACKLOG)
    except (OSError, ValueError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"{refused}: {reason}. Name another path (--uds) in a folder this user may write.") from None
    except ConfigError:
        listener.close()
        raise
    return listener


def remove_unix(path: str) -> None:
    """Takes the file of a socket that was closed away, unless it has become another server's."""
    with suppress(OSError, ValueError):
        if stat.S_ISSOCK(os.lstat(path).st_mode) and not _answers(path):
            os.unlink(path)


def _make_room(path: str, refused: str) -> None:
    try:
        there = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(there.st_mode):
        raise ConfigError(f"{refused}: there is something else. Name another path (--uds).")
    if _answers(path):
        raise ConfigError(f"{refused}: another server listens there. Name another path (--uds), or end that server.")
    os.unlink(path)


def _answers(path: str) -> bool:
    """Whether somebody listens at a socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # a full backlog, say: somebody is there
            return True
    return True
