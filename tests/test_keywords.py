"""Options and sampling parameters are checked by type checkers as they are when a program runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from penstock.config.keywords import EngineKeywords
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.sampling_keywords import AnswerKeywords, SamplingKeywords

ROOT = Path(__file__).resolve().parents[1]
RIGHT = """
from penstock import LLM, AsyncLLM, SamplingParams

def right(llm: LLM, other: AsyncLLM) -> None:
    LLM("m", dtype="float32", threads=2)
    llm.generate("a", SamplingParams(), temperature=1, stop=["b"], json_schema={"type": "object"})
    llm.chat([{"role": "user", "content": "a"}], max_tokens=3, choice=["a", "b"], parse=True)
    other.generate("a", n=2, logit_bias={3: 1.0})
    llm.generate("a", adapter="/a"), llm.chat([], adapter={"/a": 0.5, "/b": 0.5})
    llm.sampling(top_k=3)
"""
WRONG = (
    'LLM("m", dtyp="float32")',
    'LLM("m", threads="two")',
    'AsyncLLM("m", dtyp="float32")',
    'llm.generate("a", temprature=3)',
    'llm.generate("a", temperature="hot")',
    'llm.chat([{"role": "user", "content": "a"}], temprature=3)',
    'other.generate("a", temprature=3)',
    "other.chat([], jsonschema={})",
    "llm.sampling(temprature=3)",
    'llm.generate("a", adapter=3)',
)


def test_keywords_are_the_options() -> None:
    hints = get_type_hints(EngineOptions)
    assert get_type_hints(EngineKeywords) == {name: kind for name, kind in hints.items() if name != "model"}
    names = {field.name for field in fields(SamplingParams)}
    assert set(get_type_hints(SamplingKeywords)) == names
    assert set(get_type_hints(AnswerKeywords)) == names | {"adapter", "grammar", "json_schema", "regex", "choice"}


def test_a_misspelt_option_fails_the_type_checker(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    code = RIGHT + "\ndef wrong(llm: LLM, other: AsyncLLM) -> None:\n" + "".join(f"    {line}\n" for line in WRONG)
    path = tmp_path / "program.py"
    path.write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    first = code[: code.index("def wrong")].count("\n") + 2
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line}
    assert found == set(range(first, first + len(WRONG))), done.stdout
