"""The exponent by which the time of every scanner, regular expression and parser of foreign text grows.

Each gets its worst inputs at n and at 2n, where n is large enough to take measurable CPU time; with one above 1.3 the
exit status is 1. Expressions are found in the source, and their texts drawn from their own parts; the inputs of
scanners and parsers are in `benchmarks/linear`. An exponent of 0 means that no input within the limits takes 2 ms.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.linear import expressions
from benchmarks.linear.files import file_readers, request_readers, text_readers
from benchmarks.linear.growth import LIMIT, Growth, best, growth
from benchmarks.linear.scanners import Scanner, answer_parsers, grammar_readers
from benchmarks.report import arguments, report
from penstock.config import limits
from penstock.engine.text_pipeline import TextPipeline
from penstock.text.grammar import lark
from penstock.text.parsers.calls import CallMarks
from penstock.text.parsers.format import formats
from penstock.text.parsers.stream import finder

_SCREENED = 1500
COLUMNS = ("what", "worst input", "n", "ms at n", "ms at 2n", "exponent")


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of the table."""

    name: str
    given: str
    growth: Growth

    def row(self) -> tuple[str, str, int, float, float, float]:
        one, two = self.growth.seconds
        return self.name, self.given[:40], self.growth.size, 1e3 * one, 1e3 * two, self.growth.exponent


def shapes() -> list[CallMarks]:
    """How each format's calls are recognised."""
    return [CallMarks(entry.calls) for entry in formats().values() if entry.calls is not None]


def _strings_of(*folders: str) -> list[re.Pattern[str]]:
    return [re.compile(text) for text in expressions.strings(folders)]


MADE: Mapping[str, Callable[[], list[re.Pattern[str]]]] = {
    "config.resolve:validate": lambda: [re.compile(r"(?:cuda|interpreter):\d{1,3}")],
    "quant.methods.record:Method.count": lambda: _strings_of("quant/methods"),
    "weights.sources:matched": lambda: _strings_of("models", "quant/methods"),
    "weights.sources:_named": lambda: _strings_of("models"),
    "runtime.adapter_loading:AdapterLoader.__init__": lambda: _strings_of("models"),
    "text.grammar.lark:_tree": lambda: [lark._tree(frozenset(("<a>", "[b]")))[0]],
    "text.parsers.calls:CallMarks.head": lambda: [s.head[1] for s in shapes() if "{arguments}" in s.format.call],
    "text.parsers.calls:CallMarks.parameter_head": lambda: [
        s.parameter_head[1] for s in shapes() if s.format.parameter
    ],
    "text.parsers.parser:_word_after": lambda: [re.compile(r"to=functions\.([\w.\-]+)")],
    "text.parsers.stream:finder": lambda: [finder(frozenset(("<a>", "<ab>", "aab", "a"))).pattern],
}
"""Expressions that are made while running, by their place."""
_NAMES: Final = (
    "quant.methods.record:Method.count", "weights.sources:matched", "weights.sources:_named",
    "weights.readers.tied:_EMBEDDING", "weights.readers.tied:_HEAD", "weights.writers.folder_model:_LINEAR",
    "weights.writers.folder_model:_NOT_LINEAR", "runtime.adapter_loading:AdapterLoader.__init__",
)  # fmt: skip
BOUNDED: Final = dict.fromkeys(_NAMES, limits.MAX_TENSOR_NAME_CHARS)
"""The longest text that an expression can get: longer names of tensors are refused."""
_HEADS: Final = ("text.parsers.calls:CallMarks.head", "text.parsers.calls:CallMarks.parameter_head")
MATCHED: Final = frozenset((*_NAMES, *_HEADS))
"""Places whose expressions are matched at one place of a text, where the source does not show it."""


def expression_growths(worst: int = 1, limit: float = LIMIT, times: int = 5) -> Iterator[Measured]:
    """All expressions, each with those texts that take longest; what is above the limit is measured again."""
    seen: set[tuple[Any, bool, int]] = set()
    for place, call in expressions.places():
        scans = expressions.scans(place, call) and (str(place) not in MATCHED or str(place).endswith("_named"))
        most = BOUNDED.get(str(place), 2**20)
        for pattern in expressions.patterns(place, call, MADE):
            if (pattern, scans, most) in seen:
                continue
            seen.add((pattern, scans, most))
            for given, run, make in expressions.worst_texts(pattern, scans, worst):
                name = f"{place} {'scan' if scans else 'match'}"
                found = growth(run, make, most=min(most // 2, 2**19), limit=limit, times=times)
                yield Measured(name, given, found)


def scanner_growths(scanner: Scanner, worst: int = 2, limit: float = LIMIT, times: int = 5) -> Iterator[Measured]:
    """A scanner with those of its inputs that take longest; what is above the limit is measured again."""
    slow = sorted(scanner.inputs.items(), key=lambda pair: -best(scanner.run, pair[1](_SCREENED), 1))
    for given, make in slow[:worst]:
        yield Measured(scanner.name, given, growth(scanner.run, make, limit=limit, times=times))


@cache
def _tokenizer() -> Any:
    return TextPipeline.load("penstock-concierge").tokenizer


def scanners(folder: Path) -> Iterator[Scanner]:
    """All scanners and parsers; inputs that are files are written to a folder."""
    yield from grammar_readers()
    yield from answer_parsers()
    yield from request_readers()
    yield from text_readers(_tokenizer())
    yield from file_readers(folder)


def main() -> None:
    given = arguments(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [*expression_growths(worst=3)]
        for scanner in scanners(Path(folder)):
            found += scanner_growths(scanner, worst=3)
    worst: dict[str, Measured] = {}
    for entry in found:
        if entry.name not in worst or entry.growth.exponent > worst[entry.name].growth.exponent:
            worst[entry.name] = entry
    rows = [entry.row() for entry in worst.values()]
    results = {"limit": LIMIT, "measured": [dict(zip(COLUMNS, row, strict=True)) for row in rows]}
    report("linear_time", given.results, results, COLUMNS, rows)
    raise SystemExit(1 if any(entry.growth.exponent > LIMIT for entry in found) else 0)


if __name__ == "__main__":
    main()
