"""llm-comply: the published schemas of three APIs, against answers and streams."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from scenario import MODEL, main

# What is not here (images), what no model can be made to do each time (calls, reasoning), and one mistake of clients
# that is none here: a body without a model means the one that is served.
LEFT_OUT = ("image-input", "tool-calling", "reasoning-summary", "thinking-display")
NO_MISTAKE = ("error-handling", "chat-error-handling", "compact-missing-model")


def _check(url: str, form: str) -> None:
    program = Path(sys.executable).with_name("llm-comply")
    given = ["-u", f"{url}/v1", "-k", "none", "-m", MODEL, "--format", form, "--json"]
    done = subprocess.run([str(program), *given], capture_output=True, text=True, timeout=120, check=False)
    results = json.loads(done.stdout)["results"]
    left_out = [result["id"] for result in results if result["id"].endswith(LEFT_OUT) or result["id"] in NO_MISTAKE]
    checked = {result["id"]: result for result in results if result["id"] not in left_out}
    assert len(checked) >= 5, results
    assert [result for result in checked.values() if result["status"] != "passed"] == []


def open_responses(url: str) -> None:
    _check(url, "open-responses")


def openai_chat(url: str) -> None:
    _check(url, "openai-chat")


def anthropic(url: str) -> None:
    _check(url, "anthropic")


if __name__ == "__main__":
    main(open_responses, openai_chat, anthropic)
