"""One format of the log, in files and in front of a person."""

from __future__ import annotations

import io
import json
import logging
import re
import sys

import pytest

from penstock.config.logs import FIELDS, log_handler


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Screen()], ids=["file", "terminal"])
def test_a_line_clears_what_it_would_be_written_over(stream: io.StringIO) -> None:
    log_handler(stream).handle(logging.LogRecord("penstock.x", logging.INFO, "", 1, "Loaded %d.", (3,), None))
    start = "\r\x1b[K" if stream.isatty() else ""
    assert re.fullmatch(re.escape(start) + r"\d{4}-\d\d-\d\d [\d:,]+ INFO penstock.x: Loaded 3\.\n", stream.getvalue())


@pytest.mark.parametrize("stream", [io.StringIO(), Screen()], ids=["file", "terminal"])
def test_json_is_one_object_a_line_with_fields_and_exceptions(stream: io.StringIO) -> None:
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        failure = sys.exc_info()
    record = logging.LogRecord("penstock.x", logging.WARNING, "", 1, "Lost %s.\nAll.", ("é",), failure)
    setattr(record, FIELDS, {"status": 500, "path": io})
    log_handler(stream, "json").handle(record)
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", told.pop("time"))
    assert told.pop("exception").endswith("ValueError: first\nsecond") and told.pop("process") == record.process
    assert told.pop("path") == str(io)
    assert told == {"level": "warning", "logger": "penstock.x", "message": "Lost é.\nAll.", "status": 500}
