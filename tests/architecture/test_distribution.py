"""What is installed is called penstock-llm: `penstock` alone is another project's name in the package index."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

FOLDERS = (".ci", "benchmarks", "csrc", "docs", "examples", "penstock", "requirements", "tests")
TEXTS = {".cpp", ".h", ".html", ".js", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml", ""}
OTHER = re.compile(
    r"""(?:install|uninstall|download|add|uvx|pipx\ run)(?:\s+-{1,2}[\w=.-]+)*  # a command, its flags
        \s+['"`]?penstock(?![\w-]|/|\.(?:toml|py|cpp))                           # and a requirement that is not ours
      | (?<!\.)\bpenstock\[ [a-z,]+ \]                                           # or one with extras
      | \bpenstock \s? (?:==|>=|~=|<=) \s? \d                                    # or with a version
      | \bpypi\.org/(?:project|simple|pypi)/penstock\b(?!-llm)""",
    re.VERBOSE,
)


def texts() -> Iterator[Path]:
    """Every text of the project that a person or a tool may read."""
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.suffix in TEXTS and path.name != ".git")
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in TEXTS and path != Path(__file__).resolve():
                yield path


def test_the_distribution_has_its_own_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "penstock-llm"
    assert project["scripts"] == {"penstock": "penstock.__main__:main"}


def test_no_text_of_ours_names_the_other_distribution() -> None:
    found = []
    for path in texts():
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [f"{path.relative_to(ROOT)}: {match.group()!r}" for match in OTHER.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install penstock",
        "`pip install\n'penstock[fallback]'`",
        "pip install -U penstock\n",
        "uvx penstock run",
        "penstock[gpu]",
        "penstock==0.1.0",
    ],
)
def test_the_rule_sees_the_other_name(text: str) -> None:
    assert OTHER.search(text)


@pytest.mark.parametrize(
    "text",
    ["pip install 'penstock-llm[bench]'", "pip install penstock-llm", "import penstock", "pip install ./penstock/"],
)
def test_the_rule_lets_ours_pass(text: str) -> None:
    assert not OTHER.search(text)
