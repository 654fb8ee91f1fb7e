"""Trained models give the greedy tokens transformers gave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.harness import greedy, load


@pytest.mark.parametrize("chunk", [1, 1000])
def test_stories(shared_data: Path, chunk: int):
    folder = shared_data / "models" / "stories260K"
    expected = json.loads((folder / "greedy.json").read_text())
    model = load(folder / "hf")
    assert len(expected["greedy_ids"]) == 120
    assert greedy(model, expected["prompt_ids"], 120, chunk=chunk) == expected["greedy_ids"]


@pytest.mark.parametrize("chunk", [16, 1000])
def test_concierge(shared_data: Path, chunk: int):
    folder = shared_data / "models" / "penstock-concierge"
    model = load(folder)
    dialogues = json.loads((folder / "greedy.json").read_text())
    assert len(dialogues) > 5
    for dialogue in dialogues:
        found = greedy(model, dialogue["prompt_ids"], 64, stop=(0, 2), chunk=chunk)
        assert found == dialogue["greedy_ids"]
