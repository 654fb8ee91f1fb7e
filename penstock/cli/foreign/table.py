"""The flags of other engines, each with what it is here: a text file an engine.

A line that begins a group has a word and a sentence: `same` (our flag of that name), `as` (our spelling), `nothing`
(it may be left out) or `no` (what to do instead). Indented lines list flags; `=` behind one says that it takes a value,
`=*` several. In our spelling {} stands for the value, {a=b c=} for one that becomes another or is not needed, {,} for
several with commas between them, {-} for several words with dashes between them here, {[]} for a list in JSON, {MiB}
for a size in MiB that is not needed where it is 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final

ENGINES: Final = ("vllm", "sglang", "llama-server", "tgi")
SPOKEN: Final = {"vllm": "vLLM", "sglang": "SGLang", "llama-server": "llama-server", "tgi": "TGI"}
_WORDS = ("same", "as", "nothing", "no")
_CHOICE = re.compile(r"\{([^{}]*)\}")
_UNITS: Final = ("MiB", "GiB", "GB")
_NUMBER = re.compile(r"\d{1,12}(\.\d{1,12})?")


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag of another engine.

    Attributes:
        name: as it is typed.
        values: how many words it takes: 0, 1 or, for any number, 2.
        word: what it is here: "same", "as", "nothing" or "no".
        about: for "as" our spelling, else a sentence; "" for "same".
    """

    name: str
    values: int
    word: str
    about: str

    @property
    def joins(self) -> bool:
        """Whether its words are one here, with dashes between them."""
        return "{-}" in self.about

    @property
    def is_size(self) -> bool:
        """Whether its value is a number of bytes in some unit."""
        return any(f"{{{unit}}}" in self.about for unit in _UNITS)

    @property
    def sentence(self) -> str:
        """What it is here, in words."""
        if self.word == "same":
            return "the same here"
        if self.word == "as":
            return "here the model stands alone, without a flag" if self.about == "{}" else f"here: {self._spelt()}"
        return f"not needed: {self.about}" if self.word == "nothing" else self.about

    def _spelt(self) -> str:
        """Our spelling, with a word in the value's place."""
        return _CHOICE.sub(lambda found: _shown(found[1]), self.about).strip()

    def ours(self, value: str) -> list[str] | None:
        """Our words with that value in its place; None where the value has none."""
        if self.word == "same":
            return [self.name, value] if self.values else [self.name]
        found = _CHOICE.search(self.about)
        if found is None:
            return self.about.split()
        given = _values(found[1], value)
        before = self.about[: found.start()].split()
        return None if given is None else [word for one in given for word in (*before, one)]


def _values(kind: str, value: str) -> list[str] | None:
    """What becomes of a value: as it is, several with commas between them, a list in JSON, or one that has another."""
    if kind == ",":
        return [part for part in value.split(",") if part]
    if kind == "[]":
        with suppress(ValueError, RecursionError):
            listed = json.loads(value)
            return listed if isinstance(listed, list) and all(isinstance(one, str) for one in listed) else None
        return None
    if kind in _UNITS:
        if not _NUMBER.fullmatch(value):
            return None
        return [value + kind] if float(value) else []
    if "=" in kind:
        known = dict(pair.split("=", 1) for pair in kind.split())
        if value not in known:
            return None
        return [known[value]] if known[value] else []
    return [value]


def _shown(choices: str) -> str:
    if "=" not in choices:
        return f"…{choices}" if choices in _UNITS else "…"
    return "|".join(filter(None, dict.fromkeys(pair.split("=", 1)[1] for pair in choices.split())))


@cache
def flags_of(engine: str) -> Mapping[str, ForeignFlag]:
    """Every flag of an engine by its spelling, in the order of its file."""
    text = files("penstock.cli.foreign").joinpath(f"{engine}.txt").read_text(encoding="utf-8")
    return {flag.name: flag for flag in _read(text)}


def _read(text: str) -> Iterator[ForeignFlag]:
    word = about = ""
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if not line.startswith(" "):
            word, _, about = line.partition(" ")
            if word not in _WORDS:
                raise ValueError(f"{word!r} begins a group of flags; known: {', '.join(_WORDS)}")
            continue
        for listed in line.split():
            name, _, values = listed.partition("=")
            yield ForeignFlag(name, 2 if values else int("=" in listed), word, about)


def found_in(flag: str) -> Iterator[tuple[str, ForeignFlag]]:
    """The engines that have a flag, under either spelling of its dashes, and what it is here."""
    name = flag.partition("=")[0]
    name = name[:2] + name[2:].replace("_", "-")
    for engine in ENGINES:
        known = flags_of(engine).get(name)
        if known is not None:
            yield engine, known


def answer_to(flag: str) -> str | None:
    """What to tell somebody who gave `penstock serve` another engine's flag; None if nobody has it."""
    told: dict[str, list[str]] = {}
    for engine, known in found_in(flag):
        told.setdefault(known.sentence, []).append(SPOKEN[engine])
    if not told:
        return None
    return " ".join(f"{flag.partition('=')[0]} ({', '.join(engines)}): {text}" for text, engines in told.items())
