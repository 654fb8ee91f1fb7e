"""A terminal with a person in front of it: a real command in a pseudo terminal, whose screen is read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte

ENTER, ALT_ENTER, TAB, UP = "\r", "\x1b\r", "\t", "\x1b[A"


def _takes_terminal() -> None:
    """In the child: the terminal is its own, so that Ctrl-C reaches it."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command in a terminal of so many columns and rows; `close` ends it."""

    def __init__(self, *arguments: str, home: Path, columns: int = 100, rows: int = 40) -> None:
        primary, secondary = pty.openpty()
        self._screen = pyte.HistoryScreen(columns, rows, history=5000)
        self._stream = pyte.ByteStream(self._screen)
        self._fd = primary
        self.resize(columns, rows)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        environment = {
            **clean, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "XDG_STATE_HOME": str(home),
            "PROMPT_TOOLKIT_NO_CPR": "1",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock", *arguments],
            stdin=secondary, stdout=secondary, stderr=secondary, env=environment, start_new_session=True,
            preexec_fn=_takes_terminal,
        )  # fmt: skip
        os.close(secondary)
        self.raw = b""

    def resize(self, columns: int, rows: int) -> None:
        """The person changes the size of the window."""
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)
        if hasattr(self, "process"):
            self.process.send_signal(signal.SIGWINCH)

    def press(self, text: str) -> None:
        """Keys, as a terminal sends them."""
        os.write(self._fd, text.encode())

    def ask(self, text: str) -> None:
        """Waits for the prompt, and types a line."""
        self.prompted()
        self.press(text + ENTER)

    def prompted(self, seconds: float = 60) -> None:
        """Waits until the chat asks for a line."""
        deadline = time.monotonic() + seconds
        while self.shown().rpartition("\n")[2] != ">":
            self._read(deadline, "the prompt")

    def paste(self, text: str) -> None:
        """What a terminal sends for pasted text."""
        self.press(f"\x1b[200~{text}\x1b[201~")

    def lines(self) -> list[str]:
        """What is on the screen, and what has left it at the top."""
        above = ["".join(row[column].data for column in sorted(row)) for row in self._screen.history.top]
        return [line.rstrip() for line in (*above, *self._screen.display)]

    def shown(self) -> str:
        """The same as one text."""
        return "\n".join(self.lines()).rstrip()

    def expect(self, text: str, *, times: int = 1, seconds: float = 60) -> None:
        """Waits until `text` has been shown so many times."""
        deadline = time.monotonic() + seconds
        while self.shown().count(text) < times:
            self._read(deadline, text)

    def expect_raw(self, codes: bytes, seconds: float = 60) -> None:
        """Waits until these bytes have come, colours and all."""
        deadline = time.monotonic() + seconds
        while codes not in self.raw:
            self._read(deadline, repr(codes))

    def _read(self, deadline: float, wanted: str) -> None:
        if not select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError(f"{wanted!r} did not come; shown:\n{self.shown()}")
        piece = os.read(self._fd, 65536)
        if not piece:
            raise EOFError
        self.raw += piece
        self._stream.feed(piece)

    def ended(self, seconds: float = 60) -> int:
        """Reads what still comes until the command has ended; its exit status."""
        deadline = time.monotonic() + seconds
        try:
            while True:
                self._read(deadline, "the end")
        except TimeoutError:
            raise
        except (OSError, EOFError):  # nobody has the terminal any more
            pass
        return self.process.wait(60)

    def interrupt(self, text: str) -> None:
        """Presses Ctrl-C until `text` comes: one that falls between an answer and the prompt is either's."""
        for _ in range(20):
            self.press("\x03")
            with contextlib.suppress(TimeoutError):
                return self.expect(text, seconds=10)
        raise TimeoutError(f"Ctrl-C did not lead to {text!r}; shown:\n{self.shown()}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)
