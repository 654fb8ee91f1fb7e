"""Text as Jinja source."""

from __future__ import annotations

import json


def literal(text: str) -> str:
    """A string as Jinja reads it, with no braces or percent signs that could be taken for the end of a block."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted.replace("{", "\\u007b").replace("}", "\\u007d").replace("%", "\\u0025")
