"""What docs/operations.md says holds: its unit, its probes, and the end of a server whose engine cannot come back."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import typer.main
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.serve import app as serve_app
from penstock.config.environment import read_environment
from penstock.config.options import ServerOptions
from penstock.server.auth import check_exposure
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


def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=False)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL)[0])
    return found


def test_the_unit_starts_what_there_is() -> None:
    program, *arguments = unit()["Service"]["ExecStart"].split()
    assert program.endswith("/penstock")
    assert arguments[0] == "serve"
    context = typer.main.get_command(serve_app).make_context("serve", arguments[1:])
    assert context.params["port"] == 8000
    assert context.params["drain_timeout"] == 30.0


def test_the_unit_gives_draining_its_time() -> None:
    service = unit()["Service"]
    assert float(service["TimeoutStopSec"]) > ServerOptions().drain_timeout
    assert f"--drain-timeout {ServerOptions().drain_timeout:g}" in service["ExecStart"]
    assert int(re.findall(r"terminationGracePeriodSeconds: (\d+)", PAGE)[0]) > ServerOptions().drain_timeout
    assert int(re.findall(r"--stop-timeout (\d+)", PAGE)[0]) > ServerOptions().drain_timeout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL)[0].replace("/usr/local/bin/penstock", sys.executable)
    (tmp_path / "penstock.service").write_text(text.replace("User=penstock\n", ""))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "penstock.service")], capture_output=True, text=True
    )
    said = [line for line in checked.stderr.splitlines() if "penstock.service" in line]
    assert said == []


@pytest.mark.parametrize("kind", [r"docker run.*?\n\n", r"```yaml\n.*?```"])
def test_containers_are_given_what_their_address_asks_for(kind: str) -> None:
    """A server that others reach does not start without a key."""
    (shown,) = re.findall(kind, PAGE, re.DOTALL)
    (host,) = re.findall(r'--host(?: |", ")([\w.]+)', shown)
    given = read_environment(dict.fromkeys(re.findall(r"PENSTOCK_\w+", shown), "secret"))
    check_exposure(ServerOptions(host=host, api_keys=given.api_keys))


def test_probes_need_no_key(server: Running) -> None:
    for path in dict.fromkeys(re.findall(r"path: (/\w+)", PAGE)):
        assert httpx.get(server.url + path).status_code == 200


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
        until(lambda: httpx.get(f"{url}/readyz").status_code == 200, 40)
        (tmp_path / "broken").touch()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        rest = process.stdout.read()
        assert process.wait(30) == 1
    assert "could not be started again" in rest
    assert "start 2 of 2 failed" in rest
