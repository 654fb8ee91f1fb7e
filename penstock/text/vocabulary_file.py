"""Finds the vocabulary of a model folder without tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.config.errors import CheckpointError
from penstock.text.ranked import read_tekken, read_tiktoken
from penstock.text.sentencepiece_model import read_sentencepiece
from penstock.text.vocabulary import Vocabulary

_NAMES: Final = ("tekken.json", "tiktoken.model", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_RANKED_LINE: Final = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def read_vocabulary_file(folder: Path, config: Mapping[str, Any]) -> Vocabulary:
    """Reads the vocabulary file of a folder; tokenizer.model may be SentencePiece's or a tiktoken file.

    Raises:
        CheckpointError: there is none, or it cannot be used.
    """
    names = [folder / name for name in _NAMES]
    file = next((path for path in (*names, *sorted(folder.glob("*.tiktoken"))) if path.is_file()), None)
    if file is None:
        raise CheckpointError(
            f"{folder} has no tokenizer.json, and none of {', '.join(_NAMES)} or *.tiktoken. "
            "Save the tokenizer with transformers' save_pretrained, or use a GGUF file."
        )
    if file.name == "tekken.json":
        return read_tekken(file)
    try:
        with file.open("rb") as opened:
            ranked = _RANKED_LINE.match(opened.read(4096))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error
    return read_tiktoken(file, config) if ranked else read_sentencepiece(file, config)
