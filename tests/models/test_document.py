"""docs/models.md is what the registry has now."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import penstock.models
from tests.models import document
from tests.models.outcomes import COLUMNS

LARGE = {"deepseek.py", "qwen3_next.py", "mamba.py", "granite.py", "falcon_h1.py", "jamba.py", "lfm2.py"}  # ≤ 250
FALLBACK = {"fallback.py", "fallback_check.py", "fallback_trace.py"}
REGISTRY = {"defaults.py", "families.py", "family_facts.py", "registry.py"}
SHARED = {"__init__.py", "alibi.py", "blueprint.py", "fields.py", "mixture.py", "rope.py"} | REGISTRY | FALLBACK


def test_it_is_current() -> None:
    """If not: `python -m tests.models.document`."""
    written, _, found = document.DOCUMENT.read_text().partition(document.MARK)
    assert written == document.static_part()
    assert found.strip().startswith(f"| family | {' | '.join(COLUMNS)} | lines of code |")


def test_every_architecture_is_tested() -> None:
    families = document.tested()
    untested = [names for names in document.known().values() if not any(name in families for name in names)]
    decoders = {names[0] for names in untested if names[0].endswith("ForCausalLM")}
    assert decoders == {"InternLM2ForCausalLM", "InternLM3ForCausalLM", "BaichuanForCausalLM"}  # by test_layouts.py


def test_model_files_are_short() -> None:
    folder = Path(penstock.models.__file__).parent
    lengths = {path.name: len(path.read_text().splitlines()) for path in folder.glob("*.py")}
    families = {name: count for name, count in lengths.items() if name not in SHARED}
    assert {name: count for name, count in families.items() if count > (250 if name in LARGE else 150)} == {}
    assert median(families.values()) <= 60
