"""What a model folder or GGUF file says about text: tokenizer, chat template, end tokens, default sampling."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.config.errors import ParameterError
from penstock.core.sampling import SamplingParams
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoint import Checkpoint, text_config
from penstock.weights.open import open_checkpoint

_DEFAULT_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class TextPipeline:
    """The text side of a model. Torch-free.

    Attributes:
        tokenizer: text ↔ token ids.
        template: the model's chat template, None if it has none.
        eos_ids: token ids that end an answer.
        defaults: the model's own values for sampling fields that a client leaves out (generation_config.json).
        vocab_size: logits a position; token ids lie below.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    defaults: Mapping[str, Any]
    vocab_size: int

    @classmethod
    def load(cls, model: str) -> TextPipeline:
        """Reads the text side of a Hugging Face folder, a .gguf file or the bundled model; no weights.

        Raises:
            CheckpointError: nothing usable is there.
            TemplateError: the chat template is unsafe or no template.
        """
        checkpoint = open_checkpoint(model)
        tokenizer = (
            Tokenizer.from_gguf(checkpoint.metadata) if checkpoint.metadata else Tokenizer.from_folder(checkpoint.path)
        )
        return cls(
            tokenizer,
            _template(checkpoint, tokenizer),
            _eos_ids(checkpoint, tokenizer),
            MappingProxyType(_defaults(checkpoint.generation_config)),
            int(text_config(checkpoint.config).get("vocab_size") or tokenizer.vocab_size),
        )

    def sampling(self, **given: Any) -> SamplingParams:
        """Sampling parameters: what is given, else the model's defaults, else those of SamplingParams.

        Raises:
            ParameterError: a value is outside its range.
        """
        chosen: dict[str, Any] = {**self.defaults, **given}
        return SamplingParams(**chosen)


def _template(checkpoint: Checkpoint, tokenizer: Tokenizer) -> ChatTemplate | None:
    config = dict(checkpoint.tokenizer_config)
    if not config.get("chat_template"):
        return None
    for name, token_id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if name not in config and token_id is not None:  # GGUF metadata names them by id
            config[name] = tokenizer.piece(token_id)
    return ChatTemplate.from_config(config)


def _eos_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, ...]:
    """generation_config's ids (the ones chat models mean), then config's, then the tokenizer's."""
    found: dict[int, None] = {}
    configured = (checkpoint.generation_config, text_config(checkpoint.config))
    for value in [*(config.get("eos_token_id") for config in configured), sorted(tokenizer.end_ids)]:
        for token in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                found[token] = None
    return tuple(found)


def _defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Those of generation_config's values that SamplingParams accepts."""
    defaults: dict[str, Any] = {}
    for name in _DEFAULT_FIELDS:
        value: dict[str, Any] = {name: generation_config.get(name)}
        with suppress(ParameterError):
            SamplingParams(**value)
            defaults |= value
    return defaults
