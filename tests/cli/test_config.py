"""Flags from files and variables: which holds, and how it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.command import Command
from penstock.cli.main import app, commands_of

CLEAN = {f"PENSTOCK_{name}": "" for name in ("MODEL", "ISA", "THREADS", "PACK_CACHE", "API_KEY", "CONFIG")}


def shown(*arguments: str, **variables: str) -> dict[str, dict[str, Any]]:
    result = config(*arguments, **variables)
    assert result.exit_code == 0, result.output
    return {row["setting"]: row for row in json.loads(result.stdout)}


def config(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(app, ["config", "show", "serve", "--json", *arguments], env={**CLEAN, **variables})


def test_flags_come_before_variables_before_files_before_defaults(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(
        "max-model-len: 1024\nport: 9000\nseed: 3\ntemperature: 0.5\n"
        "enable-prefix-caching: false\napi-key: [a, b]\nserve:\n  port: 9001\n",
        encoding="utf-8",
    )
    found = shown("--config", str(file), "--seed", "5", PENSTOCK_MAX_MODEL_LEN="512", PENSTOCK_DTYPE="bf16")
    values = {name: (row["value"], row["from"]) for name, row in found.items()}
    assert values["--seed"] == ("5", "flag")
    assert values["--max-model-len"] == ("512", "PENSTOCK_MAX_MODEL_LEN")
    assert values["--dtype"] == ("bfloat16", "PENSTOCK_DTYPE")
    assert values["--port"] == ("9001", str(file))
    assert values["--enable-prefix-caching"] == ("false", str(file))
    assert values["--api-key"] == ("2 keys", str(file))
    assert values["--host"] == ("127.0.0.1", "default")
    assert found["--max-num-seqs"]["because"]
    assert shown(PENSTOCK_CONFIG=str(file))["--seed"]["value"] == "3"


def test_goals_and_users_decide_what_is_left_open() -> None:
    rows = {goal: shown("--goal", goal) for goal in ("latency", "balanced", "throughput")}
    for name in ("--max-num-seqs", "--max-num-batched-tokens"):
        sizes = [int(row[name]["value"]) for row in rows.values()]
        assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    few = shown("--max-users", "3")
    assert few["--max-num-seqs"]["value"] == "3" and "--max-users 3" in few["--max-num-seqs"]["because"]
    assert shown("--max-users", "3", "--max-num-seqs", "7")["--max-num-seqs"]["from"] == "flag"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max-model-length: 4", "Did you mean 'max_model_len'?"),
        ("serve:\n  portt: 4", "Did you mean 'port'?"),
        ("dtype: flaot32", "Did you mean 'float32'?"),
        ("port: [1, {a: b}]", "allowed: texts, numbers"),
        ("- a", "holds no flags"),
        ("a: [", "is no YAML"),
    ],
)
def test_a_file_that_says_nothing_usable_is_a_usage_error(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(text, encoding="utf-8")
    result = config("--config", str(file))
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = config(f"--config={tmp_path / 'none.yaml'}")
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr


def test_every_command_takes_flags_from_everywhere() -> None:
    assert [command.name for command in commands_of() if not isinstance(command, Command)] == []
