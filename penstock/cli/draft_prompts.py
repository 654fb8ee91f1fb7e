"""Prompts for answers that a draft head learns from, of a file of texts or conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.textfile import read_text
from penstock.config.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from penstock.engine.text_pipeline import TextPipeline


@dataclass(frozen=True, slots=True)
class Prompts:
    """What the model answers.

    Attributes:
        tokens: of each prompt.
        too_long: prompts that are left out, as they leave no room for an answer.
    """

    tokens: list[tuple[int, ...]]
    too_long: int


def read_prompts(path: Path, text: TextPipeline, most: int, longest: int) -> Prompts:
    """The first prompts of a file.

    A file whose name ends in .jsonl has an object a line: `messages` (and `tools`), where every turn of the assistant
    is answered anew, or `prompt`, or `turns`, a list of questions of which the first is asked. Of other files each
    paragraph is a question; for a model without a chat template, the beginning of a text.

    Args:
        path: the file.
        text: the model's.
        most: prompts.
        longest: tokens of one.

    Raises:
        ConfigError: it cannot be read, or asks nothing that fits.
    """
    content = read_text(path)
    asked = _of_lines(path, content, text) if path.suffix == ".jsonl" else _of_paragraphs(content, text)
    found, too_long = list[tuple[int, ...]](), 0
    for tokens in asked:
        if len(found) == most:
            break
        if len(tokens) > longest:
            too_long += 1
        elif tokens:
            found.append(tokens)
    if not found:
        why = f"; {too_long} have more than {longest} tokens" if too_long else ""
        raise ConfigError(f"--text {path} has no prompt that can be answered{why}.")
    return Prompts(found, too_long)


def _of_paragraphs(content: str, text: TextPipeline) -> Iterator[tuple[int, ...]]:
    for paragraph in content.split("\n\n"):
        if words := paragraph.strip():
            yield (
                _begun(words, text)
                if text.template is None
                else _chat([{"role": "user", "content": words}], None, text)
            )


def _of_lines(path: Path, content: str, text: TextPipeline) -> Iterator[tuple[int, ...]]:
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield from _of_object(json.loads(line), text)
        except (ValueError, TypeError, KeyError, RecursionError, RequestError) as error:
            raise ConfigError(f"line {number} of {path} is no prompt: {error}") from None


def _of_object(read: Any, text: TextPipeline) -> Iterator[tuple[int, ...]]:
    if not isinstance(read, dict):
        raise TypeError("it is no object")
    if isinstance(messages := read.get("messages"), list):
        turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"] or [len(messages)]
        for end in turns:
            if end:
                yield _chat(messages[:end], read.get("tools"), text)
    elif isinstance(asked := read.get("turns"), list) and asked:
        yield _chat([{"role": "user", "content": str(asked[0])}], None, text)
    elif isinstance(prompt := read.get("prompt"), str):
        yield _begun(prompt, text)
    else:
        raise KeyError("messages, turns or prompt is needed")


def _begun(prompt: str, text: TextPipeline) -> tuple[int, ...]:
    return tuple(text.tokenizer.encode(prompt))


def _chat(messages: Sequence[Mapping[str, Any]], tools: Any, text: TextPipeline) -> tuple[int, ...]:
    if text.template is None:
        raise ValueError("the model has no chat template; give texts, or objects with `prompt`")
    rendered = text.template.render(messages, tools=tools)
    return text.tokenizer.begin_chat(tuple(text.tokenizer.encode(rendered, add_special_tokens=False)))
