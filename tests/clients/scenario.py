"""What the scripts beside this file share. They run in an environment that holds neither Penstock nor pytest."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

MODEL = "penstock-concierge"
HELLO = "Hello! I want to book a table for two."
WEATHER = "What's the weather like in London?"
TOOL: dict[str, Any] = {
    "name": "GetWeather",
    "description": "Get the weather of a certain location on a date",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "Name of the city"}},
        "required": ["city"],
    },
}
FOUND = json.dumps([{"city": "London", "temperature": "61", "precipitation": "20"}])


def main(*scenarios: Callable[[str], object]) -> None:
    """Runs scenarios against the server whose URL is the argument; prints name → traceback, "" where all went well."""
    results = {}
    for scenario in scenarios:
        try:
            scenario(sys.argv[1])
            results[scenario.__name__] = ""
        except Exception:
            results[scenario.__name__] = traceback.format_exc()[-4000:]
    print("\n" + json.dumps(results))
