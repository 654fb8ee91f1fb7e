"""How every process writes its log: one format, whoever set it up; lines for people, or JSON for programs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Final, TextIO

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LOG_FORMATS: Final = ("text", "json")
FIELDS: Final = "penstock_fields"
"""Name of a record's `extra` whose entries are told apart in JSON."""
_CLEAR_LINE: Final = "\r\x1b[K"


class _Lines(logging.Formatter):
    """Lines for a terminal first clear the one they stand in: a bar of another process may be drawn there."""

    def format(self, record: logging.LogRecord) -> str:
        return _CLEAR_LINE + super().format(record)


class _JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, process, message, further fields, and the exception's text."""

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps(told, default=str)


def log_handler(stream: TextIO | None = None, form: str = "text") -> logging.Handler:
    """Writes the log to a stream, by default standard error; `form` is one of LOG_FORMATS."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    formatter = _Lines if stream.isatty() else logging.Formatter
    handler.setFormatter(_JsonLines() if form == "json" else formatter(LOG_FORMAT))
    return handler
