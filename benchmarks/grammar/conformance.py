"""Grammars against the truth: the JSON-Schema-Test-Suite, and random answers to schemas of growing size.

Of the suite (draft 2020-12, also its optional part and formats), each schema is met or refused; of those that are met,
no invalid document may be accepted, and valid ones are, but for what docs/structured-output.md lists. A random answer
is drawn token by token from the masks, for schemas of the suite and drawn ones, and has to end as a valid document.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.grammar.schemas import draw_schema
from benchmarks.grammar.walks import DeadEnd, Grammars, tokenizers, validator
from benchmarks.report import arguments, report
from penstock.config.errors import RequestError

NAMES = ("llama-spm", "qwen2", "gemma-4")
PARTS = ("", "optional", "optional/format")


@dataclass
class Found:
    """What came of a run.

    Attributes:
        met, refused: schemas, the latter by the reason's first words.
        right: documents judged as the suite does.
        wrong_accepts: invalid documents accepted.
        stricter: valid documents not accepted, by file.
        walks, dead_ends, invalid: random answers, those that could not end, and those that did not fit.
    """

    met: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    right: int = 0
    wrong_accepts: list[str] = field(default_factory=list)
    stricter: Counter[str] = field(default_factory=Counter)
    walks: int = 0
    dead_ends: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """As JSON."""
        refused = {"refused": sum(self.refused.values()), "refused_by_reason": dict(self.refused.most_common())}
        judged = {"right": self.right, "wrong_accepts": self.wrong_accepts, "stricter": dict(self.stricter)}
        walked = {"walks": self.walks, "dead_ends": self.dead_ends, "invalid": self.invalid}
        return {"met": self.met, **refused, **judged, **walked}


def cases(data: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The suite's cases: file and case."""
    for part in PARTS:
        folder = data / "json" / "json-schema-test-suite" / "tests" / "draft2020-12" / part
        for file in sorted(folder.glob("*.json")):
            for case in json.loads(file.read_text(encoding="utf-8")):
                yield file.stem, case


def reason(error: RequestError) -> str:
    """The keywords of a refusal, or its first words."""
    keys = re.search(r"Unimplemented keys: \[(.*)\]", str(error))
    text = str(error).removeprefix("the grammar cannot be met: ")
    return keys.group(1).replace('"', "") if keys else " ".join(text.split()[:4])


def suite(grammars: Grammars, data: Path, *, walks: int = 1) -> Found:
    """Judges every document of the suite, and draws answers to each schema that is met."""
    found = Found()
    for file, case in cases(data):
        try:
            matcher = grammars.compile(case["schema"])
        except RequestError as error:
            found.refused[reason(error)] += 1
            continue
        found.met += 1
        for test in case["tests"]:
            accepted = grammars.accepts(matcher, test["data"])
            if accepted and not test["valid"]:
                found.wrong_accepts.append(f"{file}: {case['description']}: {test['description']}")
            elif accepted != test["valid"]:
                found.stricter[file] += 1
            else:
                found.right += 1
        if "cole" not in str(case["schema"]) and "\\p" not in str(case["schema"]):
            # Luck finds no /[a-z]cole/, and Python's expressions, by which answers are judged, know no classes \\p.
            draw(grammars, matcher, case["schema"], f"{file}: {case['description']}", walks, found)
    return found


def draw(grammars: Grammars, matcher: Any, schema: Any, name: str, count: int, found: Found) -> None:
    """Draws answers and judges them."""
    fits = validator(schema)
    for seed in range(count):
        found.walks += 1
        try:
            text = grammars.walk(matcher, seed)
        except DeadEnd as error:
            found.dead_ends.append(f"{name}: {error}")
            continue
        if not fits(text):
            found.invalid.append(f"{name}: {text[:200]}")


def growing(grammars: Grammars, numbers: range, *, walks: int = 1) -> Found:
    """Draws answers to schemas drawn at random."""
    found = Found()
    for number in numbers:
        schema = draw_schema(number)
        try:
            matcher = grammars.compile(schema)
        except RequestError as error:
            found.refused[reason(error)] += 1
            continue
        found.met += 1
        draw(grammars, matcher, schema, f"schema {number}", walks, found)
    return found


def main() -> None:
    """Both, over three tokenizers."""
    parser = arguments(__doc__)
    parser.add_argument("--schemas", type=int, default=2000)
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for name, grammars in tokenizers(given.data, NAMES).items():
        results[name] = {
            "suite": suite(grammars, given.data).figures(),
            "growing": growing(grammars, range(given.schemas)).figures(),
        }
    columns = (
        "tokenizer", "of", "met", "refused", "right", "wrong accepts", "stricter", "walks", "dead ends", "invalid",
    )  # fmt: skip
    rows = [
        (name, part, *(f[k] if isinstance(f[k], int) else len(f[k]) for k in ("met", "refused", "right",
         "wrong_accepts")), sum(f["stricter"].values()), f["walks"], len(f["dead_ends"]), len(f["invalid"]))
        for name, parts in results.items()
        for part, f in parts.items()
    ]  # fmt: skip
    report("grammar_conformance", given.results, results, columns, rows)


if __name__ == "__main__":
    main()
