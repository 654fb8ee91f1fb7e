"""Dashboards and alerts ask for figures that a server tells, by names and labels that it gives them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.server.served import listening
from tests.server.support import until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES, CONFIG = DEPLOY / "prometheus" / "rules.yml", DEPLOY / "prometheus" / "prometheus.yml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "penstock.json").read_text())
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
MODELS = "models: {penstock-concierge: {model: penstock-concierge, options: {max_model_len: 256, threads: 1}}}\n"
COUNTED = ("http_requests_total", "http_request_seconds_bucket", "requests_finished_total")
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
SELECTOR = re.compile(r"\b((?:penstock_|up\b)\w*)(?:\{([^}]*)\})?")
BY = re.compile(r"\b(?:by|on|ignoring|without) \(([^)]*)\)")
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> dict[str, str]:
    """Every expression, by where it stands."""
    found = {f"alert {rule['alert']}": rule["expr"] for rule in ALERTS}
    for panel in panels():
        found |= {f"panel {panel['title']} {target['refId']}": target["expr"] for target in panel["targets"]}
    found |= {f"annotation {mark['name']}": mark["expr"] for mark in DASHBOARD["annotations"]["list"]}
    found |= {
        f"variable {variable['name']}": re.sub(
            r"label_values\((.*), (\w+)\)", r"sum by (\2) (\1)", variable["definition"]
        )
        for variable in DASHBOARD["templating"]["list"]
        if "definition" in variable
    }
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of every figure that a server tells which has answered and refused."""
    folder = tmp_path_factory.mktemp("told")
    (folder / "models.yaml").write_text(MODELS)

    def text() -> str:
        return httpx.get(f"{served.url}/metrics", timeout=60).text

    served = listening("-m", "penstock", "serve", "--models", str(folder / "models.yaml"), "--port", "0")
    try:
        body = {"model": "penstock-concierge", "prompt": "Hello", "max_tokens": 2}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, (answer.text, served.lines)
        until(lambda: all(f"penstock_{name}{{" in text() for name in COUNTED), 60)  # once the answer has gone out
        said = text()
    finally:
        served.process.kill()
        served.process.wait()
    labels: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(said):
        labels.setdefault(f"{family.name}_total" if family.type == "counter" else family.name, set())
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def test_every_figure_that_is_asked_for_is_told(told: dict[str, set[str]]) -> None:
    asked = {name: where for where, text in expressions().items() for name, _ in SELECTOR.findall(text)}
    assert len(asked) > 30
    assert {name: where for name, where in asked.items() if name not in told} == {}


def test_figures_have_the_labels_that_are_asked_of_them(told: dict[str, set[str]]) -> None:
    """What says why has no sample before there is a reason; its label is checked where it is made."""
    told = {name: labels or {"model_name", "reason"} for name, labels in told.items()}
    wrong = []
    for where, text in expressions().items():
        for name, matchers in SELECTOR.findall(text):
            wrong += [
                (where, name, label)
                for label in re.findall(r"(\w+)\s*(?:=|!)", matchers)
                if label not in told[name] | SCRAPED
            ]
        for group in BY.finditer(text):  # of what follows
            (name, _), *_ = SELECTOR.findall(text, group.end())
            wrong += [
                (where, name, label) for label in re.findall(r"\w+", group[1]) if label not in told[name] | SCRAPED
            ]
    assert wrong == []


def test_legends_name_labels_that_are_left() -> None:
    """A label in braces that the expression sums away would show as nothing."""
    for panel in panels():
        for target in panel["targets"]:
            kept = {label for group in BY.findall(target["expr"]) for label in re.findall(r"\w+", group)}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, panel["title"]


def test_panels_do_not_overlap_and_say_what_they_show() -> None:
    cells = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        covered = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not covered & cells and at["x"] + at["w"] <= 24, panel["title"]
        cells |= covered
    assert all(panel["description"] for panel in panels())
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--help-all"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert len(ALERTS) >= 8
    for rule in ALERTS:
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert rule["annotations"].keys() == {"summary", "remedy"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
        flags = re.findall(r"--[a-z-]+", rule["annotations"]["remedy"])
        assert [flag for flag in flags if f"{flag} " not in known and f"{flag}," not in known] == []


@needs_promtool
def test_promtool_accepts_configuration_and_rules(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a")
    text = CONFIG.read_text().replace("/run/secrets/penstock-api-key", str(tmp_path / "key"))
    (tmp_path / CONFIG.name).write_text(text)
    shutil.copy(RULES, tmp_path)
    done = subprocess.run(["promtool", "check", "config", str(tmp_path / CONFIG.name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@needs_promtool
def test_alerts_fire_when_they_should_and_not_before() -> None:
    cases = Path(__file__).parent / "alerts.yml"
    tried = {
        case["alertname"] for test in yaml.safe_load(cases.read_text())["tests"] for case in test["alert_rule_test"]
    }
    assert tried == {rule["alert"] for rule in ALERTS}
    done = subprocess.run(["promtool", "test", "rules", str(cases)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
