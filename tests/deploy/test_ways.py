"""The image, the unit, the chart and the compose file agree with each other and with the server."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_dashboards import DEPLOY
from tests.server.served import listening
from tests.server.support import until

ROOT = DEPLOY.parent
REFUSE_EXEC_GAIN = """
import ctypes, os, sys
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):  # PR_SET_MDWE, of Linux 6.3
    sys.exit(77)
os.execv(sys.executable, [sys.executable, "-m", "penstock", *sys.argv[1:]])
"""
DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
UNIT = DEPLOY / "systemd" / "penstock.service"
CHART = DEPLOY / "helm" / "penstock"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def instruction(name: str) -> str:
    """The last one of its kind."""
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)[-1]


def chart(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", "template", "r", str(CHART), *arguments], capture_output=True, text=True, timeout=60)


def test_the_image_has_what_it_is_made_from_and_no_more() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        name for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]
    }
    assert {name.split("/")[0] for name in copied} == kept
    assert [name for name in copied if not (ROOT / name).exists()] == []
    licences = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license-files"]
    assert [name for name in licences if name.split("/")[0] not in kept] == []


def test_the_image_serves_as_nobody_special_by_words_that_no_shell_reads() -> None:
    assert json.loads(instruction("ENTRYPOINT")) == ["tini", "--", "penstock", "serve"]
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", instruction("USER"))
    assert f'version="{VERSION}"' in instruction("LABEL")
    assert "://" not in DOCKERFILE


def test_the_health_check_tells_a_server_that_is_ready_from_one_that_is_not() -> None:
    words = json.loads(instruction("HEALTHCHECK").partition("CMD ")[2])
    assert words[0] == "python"

    def healthy(port: str) -> bool:
        check = [sys.executable, *words[1:]]
        nowhere = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}  # a proxy is for the way out
        there = {**os.environ, **nowhere, "PENSTOCK_PORT": port}
        return subprocess.run(check, env=there, stderr=subprocess.DEVNULL, timeout=120).returncode == 0

    served = listening("-m", "penstock", "serve", "penstock-concierge", "--port", "0")
    port = served.url.rpartition(":")[2]
    try:
        served.wait_ready()
        until(lambda: healthy(port))
    finally:
        served.process.kill()
        served.process.wait()
    with socket.socket() as nobody:  # listens on its port, which nobody else gets
        nobody.bind(("127.0.0.1", 0))
        assert not healthy(str(nobody.getsockname()[1]))


def test_users_ports_and_versions_are_the_same_everywhere() -> None:
    about, values = (yaml.safe_load((CHART / name).read_text()) for name in ("Chart.yaml", "values.yaml"))
    assert about["version"] == about["appVersion"] == VERSION
    pod = (CHART / "templates" / "deployment.yaml").read_text()
    user, group = instruction("USER").split(":")
    assert f"runAsUser: {user}\n" in pod and f"runAsGroup: {group}\n" in pod
    port = instruction("EXPOSE")
    assert f"containerPort: {port}\n" in pod and values["service"]["port"] == int(port)
    assert f"PENSTOCK_PORT={port}" in instruction("ENV") and f"mountPath: {instruction('VOLUME')}\n" in pod
    assert COMPOSE["services"]["penstock"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_compose_brings_files_that_are_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"], source
        assert set(service.get("secrets", [])) <= COMPOSE["secrets"].keys()


def test_templates_ask_for_values_that_there_are() -> None:
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    asked = set[str]()
    for path in (CHART / "templates").iterdir():
        asked |= set(re.findall(r"\.Values\.([\w.]+)", path.read_text()))
    for name in asked:
        found: Any = values
        for part in name.split("."):
            assert part in found, name
            found = found[part]
    assert values.keys() == {name.split(".")[0] for name in asked}


@pytest.mark.skipif(shutil.which("helm") is None, reason="helm is not installed")
def test_the_chart_makes_what_is_asked_for() -> None:
    refused = chart()
    assert refused.returncode != 0 and "apiKeys.value or apiKeys.existingSecret is needed" in refused.stderr
    plain = [part for part in yaml.safe_load_all(chart("--set", "apiKeys.value=a").stdout) if part]
    assert sorted(part["kind"] for part in plain) == ["Deployment", "PersistentVolumeClaim", "Secret", "Service"]
    flags = (
        "apiKeys.existingSecret=k",
        "models.existingClaim=c",
        "serviceMonitor.enabled=true",
        "model=",
        "startSeconds=61",
    )
    parts = {
        part["kind"]: part
        for part in yaml.safe_load_all(chart(*(word for flag in flags for word in ("--set", flag))).stdout)
        if part
    }
    assert sorted(parts) == ["Deployment", "Service", "ServiceMonitor"]
    pod = parts["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"] == ["--drain-timeout", "30"]
    assert container["startupProbe"]["failureThreshold"] * container["startupProbe"]["periodSeconds"] >= 61
    assert container["env"][0]["valueFrom"]["secretKeyRef"] == {"name": "k", "key": "api-keys"}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "c"}
    assert (
        parts["Service"]["spec"]["selector"].items()
        <= parts["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    )


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """With a command that is there."""
    text = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text())
    (tmp_path / UNIT.name).write_text(text)
    (tmp_path / "plain.service").write_text("[Service]\nExecStart=/bin/true\n")

    def said(name: str) -> tuple[int, str]:
        """Other units of this machine may be at fault, and are not looked at."""
        command = ["systemd-analyze", "verify", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.returncode, "\n".join(line for line in done.stderr.splitlines() if name in line)

    if said("plain.service") != (0, ""):
        pytest.skip("systemd-analyze loads no unit here")
    assert said(UNIT.name) == (0, "")
    (tmp_path / UNIT.name).write_text(f"{text}\n[Service]\nNoSuchWord=1\n")
    assert "NoSuchWord" in said(UNIT.name)[1]


@pytest.mark.skipif(sys.platform != "linux", reason="a promise of Linux")
@pytest.mark.timeout(300)
def test_a_model_answers_where_memory_that_was_written_never_becomes_executable() -> None:
    """As the unit has it, with MemoryDenyWriteExecute."""
    question = ["run", "penstock-concierge", "I am looking for a place to eat.", "--temperature", "0"]
    done = subprocess.run(
        [sys.executable, "-c", REFUSE_EXEC_GAIN, *question], capture_output=True, text=True, timeout=280
    )
    if done.returncode == 77:
        pytest.skip("this kernel cannot promise it")
    assert done.returncode == 0, done.stderr
    assert "What kind of food do you like?" in done.stdout
