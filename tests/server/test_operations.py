"""What docs/operations.md says holds: its probes, its options, and how a server ends whose engine is gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.server import document
from tests.engine.support import null_process
from tests.server.support import Running, until

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
SCRIPT = """
import sys
sys.executable = sys.argv[1]
from penstock.config.errors import PenstockError
from penstock.config.options import EngineOptions, ServerOptions
from penstock.host import process_client as client
from penstock.server import serve
client.FIRST_RESTART_DELAY_S, client.MAX_START_FAILURES = 0.05, 2
try:
    serve.serve(EngineOptions(), ServerOptions(port=0))
except PenstockError as error:
    print(error, flush=True)
    sys.exit(1)
"""


def test_probes_need_no_key(server: Running) -> None:
    for path in ("/livez", "/readyz"):
        assert httpx.get(server.url + path).status_code == 200


def test_others_are_answered_while_the_document_is_made(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, make = threading.Event(), threading.Event(), document.openapi

    def held(*args: Any, **kwargs: Any) -> dict[str, Any]:
        began.set()
        assert go.wait(60)
        return make(*args, **kwargs)

    monkeypatch.setattr(document, "openapi", held)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.get, f"{server.url}/openapi.json", timeout=60)
        assert began.wait(60)
        assert httpx.get(f"{server.url}/livez").status_code == 200
        go.set()
        assert "/v1/models" in asked.result(60).json()["paths"]


def test_options_named_are_there() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help-all"]).output
    for option in set(re.findall(r"`(--[a-z-]+)`", PAGE)) - {"--init"}:
        assert option in shown, option


def test_a_server_whose_engine_cannot_come_back_ends(tmp_path: Path) -> None:
    script = [sys.executable, "-u", "-c", SCRIPT, str(null_process(tmp_path))]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        url = next(found[0] for line in lines if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        until(lambda: httpx.get(f"{url}/readyz").status_code == 200)
        (tmp_path / "broken").touch()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        rest = process.stdout.read()
        assert process.wait(60) == 1
    assert "could not be started again" in rest
    assert "start 2 of 2 failed" in rest
