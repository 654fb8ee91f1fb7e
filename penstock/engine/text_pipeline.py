"""What a model folder or GGUF file says about text: tokenizer, chat template, end tokens, default sampling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from penstock.config.model_settings import PoolerSettings
from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.text.parsers.format import AnswerFormat, choose
from penstock.text.parsers.reading import visible_ids
from penstock.text.template import ChatTemplate
from penstock.text.tokenizer import Tokenizer
from penstock.weights.checkpoint import text_config
from penstock.weights.generation import eos_ids, sampling_defaults, template_config
from penstock.weights.kept_text import read_text
from penstock.weights.pooling import Pooling, read_pooling


@dataclass(frozen=True, slots=True)
class TextPipeline:
    """The text side of a model. Torch-free.

    Attributes:
        tokenizer: text ↔ token ids.
        template: the model's chat template, None if it has none.
        eos_ids: token ids that end an answer.
        defaults: the model's own values for sampling fields that a client leaves out (generation_config.json).
        vocab_size: logits a position; token ids lie below.
        pooling: how the model embeds, classifies and ranks.
        answers: how it writes reasoning and tool calls.
        mark_ids: control tokens that mark these.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    eos_ids: tuple[int, ...]
    defaults: Mapping[str, Any]
    vocab_size: int
    pooling: Pooling
    answers: AnswerFormat = field(default_factory=AnswerFormat)
    mark_ids: frozenset[int] = frozenset()

    @classmethod
    def load(
        cls,
        model: str,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        cache: str = "off",
        *,
        overrides: str | None = None,
        pooler: str | None = None,
    ) -> TextPipeline:
        """Reads the text side of a Hugging Face folder, a .gguf file or the bundled model; no weights.

        `tool_parser` and `reasoning_parser` name formats of answers; without them the chat template tells. `cache` is
        EngineOptions.pack_cache: where a large vocabulary is kept for the next start; `overrides` and `pooler` are its
        hf_overrides and pooler_config.

        Raises:
            ParameterError: there is no format of that name.
            CheckpointError: nothing usable is there, or the vocabulary is larger than the model's.
            TemplateError: the chat template is unsafe or no template.
        """
        checkpoint, tokenizer = read_text(model, cache, overrides)
        template = template_config(checkpoint, tokenizer.piece, bos_token=tokenizer.bos_id, eos_token=tokenizer.eos_id)
        chat = ChatTemplate.from_config(template) if template.get("chat_template") else None
        answers = choose("\n".join(chat.sources.values()) if chat else "", tool_parser, reasoning_parser)
        return cls(
            tokenizer,
            chat,
            eos_ids(checkpoint, tokenizer.end_ids),
            MappingProxyType(sampling_defaults(checkpoint.generation_config)),
            tokenizer.rows(text_config(checkpoint.config).get("vocab_size")),
            read_pooling(checkpoint, tokenizer.token_to_id).set(PoolerSettings.of(pooler)),
            answers,
            visible_ids(answers, tokenizer),
        )

    @classmethod
    def of(cls, options: EngineOptions) -> TextPipeline:
        """As `load`, of an engine's options."""
        return cls.load(
            options.model,
            options.tool_call_parser,
            options.reasoning_parser,
            options.pack_cache,
            overrides=options.hf_overrides,
            pooler=options.pooler_config,
        )

    def templated(self, source: str, tool_parser: str | None = None, reasoning_parser: str | None = None) -> Self:
        """The same with another chat template, from which its formats of answers are chosen anew; as `load`."""
        ids = {"bos_token": self.tokenizer.bos_id, "eos_token": self.tokenizer.eos_id}
        tokens = {name: "" if token is None else self.tokenizer.piece(token) or "" for name, token in ids.items()}
        chat = ChatTemplate(source, bos_token=tokens["bos_token"], eos_token=tokens["eos_token"])
        answers = choose(source, tool_parser, reasoning_parser)
        return replace(self, template=chat, answers=answers, mark_ids=visible_ids(answers, self.tokenizer))

    def sampling(self, **given: Any) -> SamplingParams:
        """Sampling parameters: what is given, else the model's defaults, else those of SamplingParams.

        Raises:
            ParameterError: a value is outside its range.
        """
        chosen: dict[str, Any] = {**self.defaults, **given}
        return SamplingParams(**chosen)
