"""`penstock collect-env`: all that a bug report needs, and nothing that is secret."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock import __version__
from penstock.cli.collect_env import PACKAGES, collect
from penstock.cli.main import app
from penstock.config.environment import told_variables

ROOT = Path(__file__).parents[2]


def test_a_report_names_versions_machine_packages_and_settings() -> None:
    result = CliRunner().invoke(app, ["collect-env"], env={"PENSTOCK_THREADS": "3", "COLUMNS": "40"})
    assert result.exit_code == 0
    titles = re.findall(r"^## (.+)$", result.stdout, re.MULTILINE)
    assert titles == ["versions", "machine", "kernels", "packages", "settings", "variables"]
    assert f"\npenstock: {__version__}\n" in result.stdout
    assert "\nthreads: 3\n" in result.stdout and "\nPENSTOCK_THREADS: 3\n" in result.stdout
    assert "failed" not in result.stdout
    assert json.loads(CliRunner().invoke(app, ["collect-env", "--json"]).stdout).keys() == set(titles)


def test_nothing_secret_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = {
        "PENSTOCK_API_KEY": "s3cret-one,s3cret-two", "PENSTOCK_ADMIN_KEY": "s3cret", "HF_TOKEN": "hf_s3cret",
        "HTTPS_PROXY": "http://me:s3cret@proxy.example:3128", "OLLAMA_AUTH": "s3cret", "MY_PASSWORD": "s3cret",
        "HF_ENDPOINT": "https://hub.example", "OMP_NUM_THREADS": "7",
    }  # fmt: skip
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    told = collect()
    assert "s3cret" not in json.dumps(told)
    assert told["variables"]["PENSTOCK_API_KEY"] == "(set)"
    assert told["variables"]["HTTPS_PROXY"] == "http://…@proxy.example:3128"
    assert told["variables"]["OMP_NUM_THREADS"] == "7"
    assert told["settings"]["api keys"] == "2 set" and told["settings"]["hub token"] == "set"
    assert "MY_PASSWORD" not in told["variables"]


def test_the_name_of_the_user_is_not_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "grace"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PENSTOCK_MODELS", str(home / "models"))
    told = collect()
    assert told["settings"]["models"] == told["variables"]["PENSTOCK_MODELS"] == "~/models"
    assert "grace" not in json.dumps(told)


def test_what_fails_is_part_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_THREADS", "many")
    told = collect()
    assert told["settings"]["failed"].startswith("ConfigError: PENSTOCK_THREADS is 'many'; allowed:")
    assert told["versions"]["penstock"] == __version__


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("http://me:s3cret@proxy:3128", "http://…@proxy:3128"),
        ("http://me:s3@cret@proxy:3128", "http://…@proxy:3128"),
        ("me:s3cret@proxy:3128", "…@proxy:3128"),
        (f"http://{'s3cret' * 50}@proxy", "http://…@proxy"),
        ("https://mirror.example/?token=s3cret", "https://mirror.example/?…"),
        ("https://mirror.example/simple", "https://mirror.example/simple"),
    ],
)
def test_no_part_of_a_password_is_told(value: str, told: str) -> None:
    assert told_variables({"HTTPS_PROXY": value}) == {"HTTPS_PROXY": told}


def test_a_long_value_is_cut_and_a_proxy_with_many_signs_takes_linear_time() -> None:
    found = told_variables({"LD_PRELOAD": "x" * 5000, "ALL_PROXY": "://" * 50_000})
    assert len(found["LD_PRELOAD"]) == len(found["ALL_PROXY"]) == 200


def test_every_package_that_is_needed_is_told() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[^A-Za-z0-9_-]", line)[0] for line in project["dependencies"]}
    assert needed <= set(PACKAGES)
