"""Questions about caches that all engines are asked: one answer of theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core.request import EngineOutput
from penstock.engine.api import Outputs


class AllAnswers:
    """`Outputs` of one question to several engines."""

    def __init__(self, asked: Sequence[Outputs]) -> None:
        self._asked = asked
        self._ended = False

    def __aiter__(self) -> AllAnswers:
        return self

    async def __anext__(self) -> EngineOutput:
        if self._ended:
            raise StopAsyncIteration
        self._ended = True
        told = [await anext(outputs) for outputs in self._asked]
        answers = [output.answer for output in told if output.answer is not None]
        if not answers:
            return told[0]
        return told[0]._replace(answer=together(answers), error=None)

    async def aclose(self) -> None:
        for outputs in self._asked:
            await outputs.aclose()


def together(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One answer of several: the pins of all, or whether any had the one that was to go."""
    if "pins" in answers[0]:
        pins = {pin["name"]: pin for answer in answers for pin in answer["pins"]}
        return {"pins": sorted(pins.values(), key=lambda pin: pin["seconds"])}
    return {"deleted": any(answer["deleted"] for answer in answers)}
