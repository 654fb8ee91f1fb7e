"""A real Prometheus scrapes a real server with a key, evaluates the alerts, and one fires."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.deploy.test_dashboards import CONFIG, RULES
from tests.server.served import listening
from tests.server.support import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]
KEY = "a-key-of-this-test"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_figures_arrive_and_an_engine_that_died_is_told(tmp_path: Path) -> None:
    served = listening("-m", "penstock", "serve", "penstock-concierge", "--port", "0", "--api-key", KEY)
    (tmp_path / "key").write_text(KEY)
    text = CONFIG.read_text().replace("/run/secrets/penstock-api-key", str(tmp_path / "key"))
    text = text.replace("penstock:8000", served.url.removeprefix("http://")).replace("15s", "1s")
    (tmp_path / CONFIG.name).write_text(text)
    shutil.copy(RULES, tmp_path)
    port = free_port()
    command = ["prometheus", f"--config.file={tmp_path / CONFIG.name}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    prometheus = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
    api = f"http://127.0.0.1:{port}/api/v1"

    def asked(query: str) -> list[Any]:
        found: list[Any] = httpx.get(f"{api}/query", params={"query": query}).json()["data"]["result"]
        return found

    def firing() -> set[str]:
        alerts = httpx.get(f"{api}/alerts").json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def answers() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    try:
        served.wait_ready()
        until(answers, 60)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        headers = {"Authorization": f"Bearer {KEY}"}
        assert (
            httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=60).status_code == 200
        )
        until(lambda: [x["value"][1] for x in asked("penstock_generation_tokens_total")] == ["4"], 60)
        assert asked('up{job="penstock"}')[0]["value"][1] == "1"
        groups = httpx.get(f"{api}/rules").json()["data"]["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}
        assert firing() == set()
        for engine in served.children():
            engine.send_signal(signal.SIGKILL)
        until(lambda: "PenstockEngineRestarts" in firing(), 90)
        groups = httpx.get(f"{api}/rules").json()["data"]["groups"]
        assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}
        assert served.stop(40) == 0
    finally:
        prometheus.kill()
        prometheus.wait()
        if psutil.pid_exists(served.process.pid):
            served.process.kill()
        served.process.wait()
