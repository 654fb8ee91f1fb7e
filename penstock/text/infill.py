"""Filling in the middle: a prompt of what stands before and behind a place, between the tokens a model has for that.

Layout: Bavarian et al. 2022 (2207.14255), prefix-suffix-middle; with further files in the repository-level layout of
Qwen2.5-Coder (2409.12186). The tokens' names are those that models' vocabularies have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.config.errors import RequestError
from penstock.text.tokenizer import Tokenizer

_NAMES: Final = {
    "prefix": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "[PREFIX]"),
    ),
    "suffix": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "[SUFFIX]"),
    ),
    "middle": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "[MIDDLE]"),
    ),
    "pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    "repository": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "file": ("<|file_sep|>",),
}
_BETWEEN_FILES: Final = "\n\n--- snippet ---\n\n"
_REPOSITORY: Final = "myproject\n"
_THIS_FILE: Final = "filename\n"


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """A model's tokens for filling in, None for those it does not have."""

    prefix: int | None = None
    suffix: int | None = None
    middle: int | None = None
    pad: int | None = None
    repository: int | None = None
    file: int | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> InfillTokens:
        """Those of a vocabulary."""
        found: dict[str, int | None] = {}
        for field, names in _NAMES.items():
            ids = (tokenizer.token_to_id(name) for name in names)
            found[field] = next((token for token in ids if token is not None), None)
        return cls(**found)

    @property
    def missing(self) -> Sequence[str]:
        """Those without which nothing can be filled in and which are not there."""
        return [name for name in ("prefix", "suffix", "middle") if getattr(self, name) is None]

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end what is filled in, besides the model's own."""
        return tuple(token for token in (self.pad, self.repository, self.file) if token is not None)


@dataclass(frozen=True, slots=True)
class InfillText:
    """What is to be filled in.

    Attributes:
        prefix, suffix: the text before and behind the place.
        begun: what of the middle is written already.
        files: (name, text) of further files, the farthest first.
    """

    prefix: str
    suffix: str
    begun: str = ""
    files: Sequence[tuple[str, str]] = ()


def infill_ids(tokenizer: Tokenizer, tokens: InfillTokens, text: InfillText, room: int) -> list[int]:
    """The prompt in tokens, cut to `room`: of other files the front goes first, then what is farthest from the place.

    Of what is left for prefix and suffix, the prefix gets three quarters, and what the other does not need.

    Raises:
        RequestError: there is no room for what is written of the middle.
        ValueError: the vocabulary lacks a token for this.
    """
    if tokens.prefix is None or tokens.suffix is None or tokens.middle is None:
        raise ValueError(f"the vocabulary has no {', '.join(tokens.missing)} token")

    def plain(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False, parse_special=False) if part else []

    begun = plain(text.begun)
    first = tokenizer.encode("a")[:1]
    head = first if first == [tokenizer.bos_id] else []
    left = room - len(head) - len(begun) - 3
    if left < 0:
        raise RequestError("prompt is longer than the context; shorten it.", param="prompt", code="invalid_value")
    before, behind = plain(text.prefix), plain(text.suffix)
    for_suffix = min(len(behind), max(left // 4, left - len(before)))
    before = before[max(0, len(before) - (left - for_suffix)) :]
    behind = behind[:for_suffix]
    files = _files(plain, tokens, text.files)
    files = files[max(0, len(files) - (left - len(before) - len(behind))) :]
    return [*files, *head, tokens.prefix, *before, *begun, tokens.suffix, *behind, tokens.middle]


def _files(plain: Callable[[str], list[int]], tokens: InfillTokens, files: Sequence[tuple[str, str]]) -> list[int]:
    """Other files in tokens, each behind its name where the model has a token for that."""
    ids: list[int] = []
    if tokens.repository is not None:
        ids += [tokens.repository, *plain(_REPOSITORY)]
    for name, text in files:
        ids += plain(_BETWEEN_FILES) if tokens.file is None else [tokens.file, *plain(f"{name}\n")]
        ids += plain(text)
    return ids if tokens.file is None else [*ids, tokens.file, *plain(_THIS_FILE)]
