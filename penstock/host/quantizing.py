"""Quantising for a client of a server: in a process of its own, behind all else that the machine computes.

As a program it does the work: `python -m penstock.host.quantizing MODEL FORMAT OUTPUT` writes how far it is to its
standard output, a JSON object a line, and ends when its standard input does, with whoever started it.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Final

import msgspec

from penstock.config.errors import PenstockError
from penstock.engine.messages import Fatal, Progress, fatal_error

NICENESS: Final = 10  # how far it stands back behind the engines
_LOOK_S = 0.1  # between two looks at whether it is still wanted, and between two tellings
_PROGRAM = (  # as for an engine
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.path.append(sys.argv[1]); "
    "runpy.run_module('penstock.host.quantizing', None, '__main__')"
)
_lines: msgspec.json.Decoder[Progress | Fatal] = msgspec.json.Decoder(Progress | Fatal)


def quantize_apart(
    model: Path, format: str, output: Path, told: Callable[[int, int], None], check: Callable[[], None]
) -> None:
    """Writes a quantised copy of a model; waits for it. What `check` or `told` raise ends the process.

    Args:
        model, format, output: as for `weights.writers.quantize.quantize_model`.
        told: progress, in bytes.
        check: called again and again; raises where nobody wants the copy any more.

    Raises:
        PenstockError: as there, or the process died.
    """
    arguments = [str(Path(__file__).resolve().parents[2]), str(model), format, str(output)]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", _PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:  # waits for its end
        assert process.stdout is not None
        try:
            for line in _read(process.stdout, check):
                message = _lines.decode(line)
                if isinstance(message, Fatal):
                    raise fatal_error(message)
                told(message.done, message.total)
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
        raise PenstockError(f"the model could not be quantised: that process ended with {how}; the log may say why.")


def _read(stream: IO[bytes], check: Callable[[], None]) -> Iterator[bytes]:
    """The lines of a pipe as they come, to its end."""
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            check()
            if not selector.select(_LOOK_S):
                continue
            piece = os.read(stream.fileno(), 1 << 16)
            if not piece:
                return
            *lines, rest = (rest + piece).split(b"\n")
            yield from lines


def end_with_parent() -> None:
    """Has this process end when its standard input does."""

    def wait() -> None:
        with suppress(OSError):
            while os.read(0, 1 << 12):
                pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    """Quantises; 0 if the copy is there."""
    end_with_parent()
    os.nice(NICENESS)
    asked = sys.argv[-3:]
    last = 0.0

    def tell(message: Progress | Fatal) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if done == total or time.monotonic() - last > _LOOK_S:
            last = time.monotonic()
            tell(Progress(done, total))

    from penstock.weights.writers.quantize import quantize_model

    try:
        quantize_model(asked[0], asked[1], Path(asked[2]), progress=progress)
    except PenstockError as error:
        tell(Fatal(type(error).__name__, str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
