"""One format of the log, in files and in front of a person."""

from __future__ import annotations

import io
import logging
import re

import pytest

from penstock.config.logs import log_handler


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Screen()], ids=["file", "terminal"])
def test_a_line_clears_what_it_would_be_written_over(stream: io.StringIO) -> None:
    log_handler(stream).handle(logging.LogRecord("penstock.x", logging.INFO, "", 1, "Loaded %d.", (3,), None))
    start = "\r\x1b[K" if stream.isatty() else ""
    assert re.fullmatch(re.escape(start) + r"\d{4}-\d\d-\d\d [\d:,]+ INFO penstock.x: Loaded 3\.\n", stream.getvalue())
