"""What guard models are asked and how they answer. Pure: no engine, no HTTP."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

CATEGORIES: Final = (
    *("harassment", "harassment/threatening", "hate", "hate/threatening", "illicit", "illicit/violent"),
    *("self-harm", "self-harm/intent", "self-harm/instructions", "sexual", "sexual/minors"),
    *("violence", "violence/graphic"),
)
"""OpenAI's."""
Word = tuple[str, Sequence[tuple[str, float]]]
"""A token of an answer, and what could have been there instead with log-probabilities, itself included."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a guard says of a text.

    Attributes:
        flagged: whether it is unsafe.
        score: the probability of that.
        categories: of OpenAI's, those it names.
    """

    flagged: bool
    score: float
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Question:
    """What a guard is asked of a text: variables for its template, and what its "yes" means."""

    variables: Mapping[str, Any] = field(default_factory=dict)
    categories: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Guard:
    """A family of guard models.

    Attributes:
        name: what people call it.
        mark: a text that its chat template has.
        bad, good, unsure: how its verdicts begin, in small letters.
        questions: what is asked of each text; each is a prompt of its own.
        named: what the categories that it names are at OpenAI, in small letters.
        verdict: finds the place of the verdict in an answer in small letters; its group 1 is the verdict.
        tokens: most that an answer takes.
    """

    name: str
    mark: str
    bad: str
    good: str
    verdict: re.Pattern[str]
    tokens: int
    unsure: str = ""
    questions: tuple[Question, ...] = (Question(),)
    named: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def read(self, words: Sequence[Word], question: Question) -> Verdict:
        """The verdict of an answer; one that says none is flagged: who guards must not let pass what it cannot read."""
        text = "".join(word for word, _ in words)
        found = self.verdict.search(text.lower())
        if found is None:
            return Verdict(True, 1.0, question.categories)
        score = self._score(words, found.start(1), found[1])
        flagged = found[1] == self.bad
        if not self.named:
            return Verdict(flagged, score, question.categories)
        rest = text[found.end() :].lower()
        told = {category for name, given in self.named.items() if _has(rest, name) for category in given}
        could = dict.fromkeys(category for given in self.named.values() for category in given)
        unsafe = flagged or (self.unsure != "" and found[1] == self.unsure)
        return Verdict(flagged, score, tuple(name for name in could if name in told) if unsafe else tuple(could))

    def _score(self, words: Sequence[Word], place: int, said: str) -> float:
        """The probability of "bad", and half of "unsure", among what could have been said at a place of the text."""
        at = 0
        for word, others in words:
            if at + len(word) > place:
                return self._weighed(others, said)
            at += len(word)
        return float(said == self.bad)

    def _weighed(self, others: Sequence[tuple[str, float]], said: str) -> float:
        weights = dict.fromkeys((self.bad, self.good, self.unsure), 0.0)
        for text, logprob in others:
            word = text.strip().lower()
            if word and (meant := next((w for w in weights if w and (w.startswith(word) or word.startswith(w))), None)):
                weights[meant] += math.exp(logprob)
        mass = sum(weights.values())
        if not mass:
            return float(said == self.bad)
        return (weights[self.bad] + weights[self.unsure] / 2) / mass


def _has(text: str, name: str) -> bool:
    """Whether a name stands in a text as a word of its own."""
    at = text.find(name)
    while at >= 0:
        around = text[max(0, at - 1) : at] + text[at + len(name) : at + len(name) + 1]
        if not any(one.isalnum() or one in "_-" for one in around):
            return True
        at = text.find(name, at + 1)
    return False


_HAZARDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "s1": ("violence", "illicit/violent"),
        "s2": ("illicit",),
        "s3": ("sexual", "illicit"),
        "s4": ("sexual/minors", "sexual"),
        "s5": ("harassment",),
        "s6": ("illicit",),
        "s7": ("illicit",),
        "s8": ("illicit",),
        "s9": ("illicit/violent", "violence"),
        "s10": ("hate",),
        "s11": ("self-harm",),
        "s12": ("sexual",),
        "s13": ("illicit",),
        "s14": ("illicit",),
    }
)
"""MLCommons' hazards, as Llama Guard numbers them."""
_QWEN: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "violent": ("violence",),
        "non-violent illegal acts": ("illicit",),
        "sexual content or sexual acts": ("sexual",),
        "pii": ("illicit",),
        "personally identifiable information": ("illicit",),
        "suicide & self-harm": ("self-harm",),
        "unethical acts": ("harassment", "hate"),
        "politically sensitive topics": ("illicit",),
        "copyright violation": ("illicit",),
        "jailbreak": ("illicit",),
    }
)
_SHIELD: Final = (
    (
        ("illicit", "illicit/violent", "self-harm"),
        '"No Dangerous Content": The prompt shall not contain or ask for what helps to hurt oneself or others: weapons '
        "or drugs and how they are had or made, terrorism, suicide.",
    ),
    (
        ("harassment",),
        '"No Harassment": The prompt shall not contain or ask for what bullies, threatens or abuses another person.',
    ),
    (
        ("hate",),
        '"No Hate Speech": The prompt shall not contain or ask for hatred of people for their race, ethnicity, '
        "nationality, religion, caste, gender, sexual orientation or disability.",
    ),
    (
        ("sexual",),
        '"No Sexually Explicit Information": The prompt shall not contain or ask for descriptions of sexual acts or '
        "other lewd content.",
    ),
)
"""ShieldGemma's four policies; its template has a place for one."""
_GRANITE: Final = (
    ("violence", ("violence",)),
    ("sexual_content", ("sexual",)),
    ("social_bias", ("hate",)),
    ("profanity", ("harassment",)),
    ("unethical_behavior", ("illicit",)),
)
_YES: Final = re.compile(r"(?:<score>|^)\s*(yes|no)\b")
GUARDS: Final = (
    Guard(
        "Llama Guard",
        "unsafe content",
        bad="unsafe",
        good="safe",
        verdict=re.compile(r"^\s*(unsafe|safe)"),
        tokens=32,
        named=_HAZARDS,
    ),
    Guard(
        "Qwen3Guard",
        "Non-violent Illegal Acts",
        bad="unsafe",
        good="safe",
        unsure="controversial",
        verdict=re.compile(r"safety:\s*(unsafe|safe|controversial)"),
        tokens=64,
        named=_QWEN,
    ),
    Guard(
        "ShieldGemma",
        "policy expert",
        bad="yes",
        good="no",
        verdict=_YES,
        tokens=4,
        questions=tuple(Question({"guideline": text}, categories) for categories, text in _SHIELD),
    ),
    Guard(
        "Granite Guardian",
        "guardian_config",
        bad="yes",
        good="no",
        verdict=re.compile(r"(?:<score>|^)\s*(yes|no)\b", re.MULTILINE),
        tokens=64,
        questions=tuple(
            Question({"guardian_config": {"risk_name": name, "criteria_id": name}, "think": False}, categories)
            for name, categories in _GRANITE
        ),
    ),
)


def guard_of(templates: Mapping[str, str]) -> Guard | None:
    """The family that a model's chat templates are of; None of other models.

    Qwen3Guard's has Llama Guard's words too, so the most telling marks come first.
    """
    text = "\n".join(templates.values())
    return next((guard for guard in sorted(GUARDS, key=_telling) if guard.mark in text), None)


def _telling(guard: Guard) -> int:
    return -len(guard.mark)


LABELS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        **{name: (name,) for name in CATEGORIES},
        **{name.replace("/", "_").replace("-", "_"): (name,) for name in CATEGORIES},
        "h": ("hate",),
        "h2": ("hate/threatening",),
        "hr": ("harassment",),
        "sh": ("self-harm",),
        "s": ("sexual",),
        "s3": ("sexual/minors",),
        "v": ("violence",),
        "v2": ("violence/graphic",),
        "toxic": ("harassment",),
        "toxicity": ("harassment",),
        "severe_toxic": ("harassment",),
        "severe_toxicity": ("harassment",),
        "insult": ("harassment",),
        "threat": ("harassment/threatening",),
        "obscene": ("sexual",),
        "sexual_explicit": ("sexual",),
        "identity_hate": ("hate",),
        "identity_attack": ("hate",),
        "hateful": ("hate",),
        "hate_speech": ("hate",),
        "nsfw": ("sexual",),
        "offensive": ("harassment",),
        "unsafe": ("illicit",),
        "jailbreak": ("illicit",),
        "injection": ("illicit",),
    }
)
"""Labels of classifiers in small letters, and what they are at OpenAI."""
_THRESHOLD: Final = 0.5


def is_classifier(labels: Sequence[str]) -> bool:
    """Whether a model's labels are of moderation."""
    return any(_label(label) in LABELS for label in labels)


def of_labels(labels: Sequence[str], scores: Sequence[float]) -> list[Verdict]:
    """The verdicts of a classifier: those of its labels that are known."""
    told = (
        (LABELS[_label(label)], score) for label, score in zip(labels, scores, strict=False) if _label(label) in LABELS
    )
    return [Verdict(score >= _THRESHOLD, score, categories) for categories, score in told]


def _label(label: str) -> str:
    return label.strip().lower().replace(" ", "_")


def result(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """OpenAI's object of one text; each category has the highest score of the verdicts that are about it."""
    scores = dict.fromkeys(CATEGORIES, 0.0)
    flags = dict.fromkeys(CATEGORIES, False)
    for verdict in verdicts:
        for name in verdict.categories:
            scores[name] = max(scores[name], verdict.score)
            flags[name] |= verdict.flagged
    return {
        "flagged": any(verdict.flagged for verdict in verdicts),
        "categories": flags,
        "category_scores": scores,
        "category_applied_input_types": {name: ["text"] for name in CATEGORIES},
    }
