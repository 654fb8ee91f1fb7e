"""How every process writes its log: one format, whoever set it up."""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_CLEAR_LINE: Final = "\r\x1b[K"


class _Lines(logging.Formatter):
    """Lines for a terminal first clear the one they stand in: a bar of another process may be drawn there."""

    def format(self, record: logging.LogRecord) -> str:
        return _CLEAR_LINE + super().format(record)


def log_handler(stream: TextIO | None = None) -> logging.Handler:
    """Writes the log to a stream, by default standard error."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter((_Lines if stream.isatty() else logging.Formatter)(LOG_FORMAT))
    return handler
