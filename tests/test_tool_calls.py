"""The bundled model calls functions as its benchmark says, on a part of the benchmark's dialogues."""

from __future__ import annotations

from pathlib import Path

from benchmarks.tool_calls import MODEL, fitting, measure, turns
from penstock import LLM


def test_the_bundled_model_calls_functions(shared_data: Path) -> None:
    with LLM(MODEL, threads=1) as llm:
        figures = measure(llm, fitting(llm, list(turns(shared_data, 8))))
    auto, required, calling = figures["auto"], figures["required"], figures["calling_turns"]
    assert calling > 15
    assert auto["called"] >= 0.85 * calling
    assert auto["parsed"] == auto["calls"]
    assert auto["texts_with_marks"] == 0
    assert required["called"] == calling
    assert required["valid_of_those"] == required["calls_that_ended"] > 0.9 * calling
    assert required["function_right"] >= 0.65 * calling
