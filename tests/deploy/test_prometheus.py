"""A real Prometheus scrapes a real server with a key, evaluates the alerts, and one fires."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.test_dashboards import CONFIG, RULES
from tests.server.served import listening
from tests.server.support import until

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]
KEY = "a-key-of-this-test"


def address(log: Path) -> str:
    """Where it listens, on a port that the system chose."""
    found = re.findall(r'"Listening on".*? address=(\S+)', log.read_text())
    return f"http://{found[-1]}" if found else ""


def test_figures_arrive_and_an_engine_that_died_is_told(tmp_path: Path) -> None:
    served = listening("-m", "penstock", "serve", "penstock-concierge", "--port", "0", "--api-key", KEY)
    (tmp_path / "key").write_text(KEY)
    text = CONFIG.read_text().replace("/run/secrets/penstock-api-key", str(tmp_path / "key"))
    text = text.replace("penstock:8000", served.url.removeprefix("http://")).replace("15s", "1s")
    (tmp_path / CONFIG.name).write_text(text)
    shutil.copy(RULES, tmp_path)
    log = tmp_path / "log"
    command = ["prometheus", f"--config.file={tmp_path / CONFIG.name}", f"--storage.tsdb.path={tmp_path / 'data'}"]
    with log.open("w") as said:
        prometheus = subprocess.Popen([*command, "--web.listen-address=127.0.0.1:0"], stderr=said)

    def api(path: str, **params: str) -> Any:
        return httpx.get(f"{address(log)}/api/v1/{path}", params=params, timeout=60).json()["data"]

    def values(query: str) -> set[str]:
        return {found["value"][1] for found in api("query", query=query)["result"]}

    def health() -> set[str]:
        return {rule["health"] for group in api("rules")["groups"] for rule in group["rules"]}

    def firing() -> set[str]:
        return {alert["labels"]["alertname"] for alert in api("alerts")["alerts"] if alert["state"] == "firing"}

    try:
        served.wait_ready()
        until(lambda: bool(address(log)))
        until(lambda: httpx.get(f"{address(log)}/-/ready", timeout=60).status_code == 200)
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        headers = {"Authorization": f"Bearer {KEY}"}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, headers=headers, timeout=60).json()
        tokens = str(answer["usage"]["completion_tokens"])
        until(lambda: values("penstock_generation_tokens_total") == {tokens}, 120)
        until(lambda: values('up{job="penstock"}') == {"1"})
        until(lambda: health() == {"ok"})
        assert "PenstockEngineRestarts" not in firing()
        for child in served.children():
            if "penstock.engine.process" in " ".join(child.cmdline()):
                child.send_signal(signal.SIGKILL)
        until(lambda: "PenstockEngineRestarts" in firing(), 120)
    finally:
        prometheus.kill()
        prometheus.wait()
        served.process.kill()
        served.process.wait()
