"""The text that `perplexity` and `imatrix` run a model over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions

if TYPE_CHECKING:
    from penstock.evaluate.scoring import Window

DEFAULT_CONTEXT = 512
Context = Annotated[
    int | None, typer.Option("--context", "-c", help="Tokens of a stretch. Default: 512, or what the model has.")
]
Chunks = Annotated[int | None, typer.Option("--chunks", min=1, help="Only the first so many stretches.")]


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
        ConfigError: it cannot be read as UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path} cannot be read as UTF-8 text: {error}.") from None


def text_windows(
    engine: EngineOptions, text: Path, context: int | None, stride: int | None, chunks: int | None
) -> tuple[list[Window], int]:
    """The text in stretches for the model.

    Args:
        engine: names the model, whose tokenizer is used.
        text: the file.
        context: tokens of a stretch; None takes 512, or the model's context length where that is shorter.
        stride: None for stretches side by side, their second halves scored.
        chunks: the first so many stretches; None takes all.

    Returns:
        The stretches, and the tokens of one.

    Raises:
        ConfigError: the text cannot be read, or is too short.
        CheckpointError: the model cannot be read or run.
    """
    from penstock.engine.text_pipeline import TextPipeline
    from penstock.evaluate.scoring import halved_windows, strided_windows
    from penstock.models.registry import check_architecture
    from penstock.weights.facts import model_facts
    from penstock.weights.open import open_checkpoint

    checkpoint = open_checkpoint(engine.model, engine.hf_overrides)
    check_architecture(checkpoint.config)
    longest = model_facts(checkpoint).context_length
    size = min(DEFAULT_CONTEXT, longest) if context is None else context
    if not 2 <= size <= longest:
        raise ConfigError(f"--context is {size}; allowed: 2 to {longest}, the model's context length.")
    tokenizer = TextPipeline.of(engine).tokenizer
    ids = tokenizer.encode(read_text(text))
    begins = tokenizer.bos_id is not None and ids[:1] == [tokenizer.bos_id]
    if stride is None:
        windows = halved_windows(ids, size, tokenizer.bos_id if begins else None)
    else:
        windows = strided_windows(ids, size, stride)
    return windows[:chunks], size
