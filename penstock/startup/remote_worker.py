"""`penstock worker`: processes here for a model that another machine leads, one after the other. No torch."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

from penstock.runtime.ranks import joining
from penstock.startup.run_worker import run_worker

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
            joined = joining.call(address, token)
        except OSError as error:
            if not told:
                log.info("nobody leads at %s yet (%s); trying again", name, error)
            told = True
            time.sleep(AGAIN_S)
            continue
        told = False
        log.info("joined %s", name)
        status = _served(joined, own)
        log.info("the worker's process has ended with status %d", status)
        if once:
            return status
        time.sleep(AGAIN_S)


def _served(joined: Mapping[bytes, socket.socket], own: Mapping[str, object]) -> int:
    """Runs a process over the connections of one worker, until it ends."""
    try:
        numbers = {kind: joined[kind].fileno() for kind in joining.KINDS}
        links = [numbers[joining.FROM], numbers[joining.TO]]
        ends = {"wire": numbers[joining.WIRE], "parent": os.getpid(), "links": links, "life": numbers[joining.LIFE]}
        process = run_worker({**ends, "own": own}, tuple(numbers.values()))
    finally:
        for connection in joined.values():
            connection.close()
    try:
        return process.wait()
    finally:
        process.kill()
        process.wait()
