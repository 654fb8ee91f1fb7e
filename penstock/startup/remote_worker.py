"""`penstock worker`: processes here for a model that another machine leads, one after the other. No torch."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from penstock.runtime.ranks import joining
from penstock.startup.workers import PROGRAM

AGAIN_S: Final = 1.0  # between two calls where nobody listens
log = logging.getLogger(__name__)


def work(address: tuple[str, int], token: str, own: dict[str, object], *, once: bool = False) -> int:
    """Joins whoever leads at an address, and again when that has ended; returns after the first with `once`.

    Args:
        address: host and port.
        token: that both know.
        own: fields of `startup.worker_process.Own`.

    Returns:
        The status of the last process.

    Raises:
        ConfigError: who listens there does not know the token.
    """
    name = f"{address[0]}:{address[1]}"
    told = False
    while True:
        try:
            wire, life = joining.call(address, token)
        except OSError as error:
            if not told:
                log.info("nobody leads at %s yet (%s); trying again", name, error)
            told = True
            time.sleep(AGAIN_S)
            continue
        told = False
        log.info("joined %s", name)
        status = _served(wire, life, own)
        log.info("the worker's process has ended with status %d", status)
        if once:
            return status
        time.sleep(AGAIN_S)


def _served(wire: socket.socket, life: socket.socket, own: dict[str, object]) -> int:
    """Runs a process over two connections, until it ends."""
    package = str(Path(__file__).resolve().parents[2])
    with wire, life:
        ends = (wire.fileno(), life.fileno())
        words = [package, str(ends[0]), str(os.getpid()), "", "0", str(ends[1]), json.dumps(own)]
        command = [sys.executable, "-P", "-c", PROGRAM, *words]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=ends)
    try:
        return process.wait()
    finally:
        process.kill()
        process.wait()
