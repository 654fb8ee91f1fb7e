"""How a checkpoint pools: what its files and those of sentence-transformers say of embedding, classifying and ranking.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.config import limits
from penstock.config.errors import CheckpointError, ConfigError, ParameterError, RequestError
from penstock.config.model_settings import PoolerSettings
from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.models.families import named
from penstock.models.family_facts import Judge
from penstock.text.pairs import PairPrompt
from penstock.weights.checkpoint import Checkpoint, text_config
from penstock.weights.readers.modules import Module, Prompts, read_modules, read_prompts

CLASSIFIER = "ForSequenceClassification"
# sentence-transformers' names, the old flag and the new value, for what is served.
_MODES = (
    ("pooling_mode_cls_token", "cls", PoolingKind.CLS),
    ("pooling_mode_mean_tokens", "mean", PoolingKind.MEAN),
    ("pooling_mode_lasttoken", "lasttoken", PoolingKind.LAST),
)
_GGUF_KINDS = {1: PoolingKind.MEAN, 2: PoolingKind.CLS, 3: PoolingKind.LAST}
_GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "?")
_ACTIVATIONS = {"Sigmoid": "sigmoid", "Identity": "", "Softmax": "softmax"}


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a model does with a prompt besides continuing it.

    Attributes:
        architecture: for messages.
        kind: the tokens its vectors are made of.
        normalize: whether vectors have a length of one unless asked otherwise.
        size: elements of a hidden state.
        labels: of its classification head; () without one.
        activation: of the scores of those labels.
        choices: token ids of "no" and "yes", for language models that rank by answering so; else ().
        generates: whether it can continue a prompt at all.
        pair_prompt: how it is asked about a pair of texts; None for their tokens one after the other.
        prompts: what stands before texts that are embedded.
        pools_prompts: whether the tokens of those count in a vector.
        settings: what the operator has said of it.
    """

    architecture: str
    kind: PoolingKind
    normalize: bool
    size: int
    labels: tuple[str, ...] = ()
    activation: str = ""
    choices: tuple[int, ...] = ()
    generates: bool = True
    pair_prompt: PairPrompt | None = None
    prompts: Prompts = field(default_factory=Prompts)
    pools_prompts: bool = True
    settings: PoolerSettings = field(default_factory=PoolerSettings)

    def set(self, settings: PoolerSettings) -> Pooling:
        """The same as its operator wants it.

        Raises:
            ConfigError: the model's vectors have fewer dimensions.
        """
        size = settings.dimensions
        if size is not None and (self.labels or size > self.size):
            told = "none, as it gives scores" if self.labels else f"at most {self.size}, the size of this model's"
            raise ConfigError(f"--pooler-config: dimensions is {size}; allowed: {told}.")
        active = settings.use_activation
        return replace(
            self,
            kind=self.kind if settings.pooling_type is None else PoolingKind[settings.pooling_type],
            normalize=self.normalize if active is None else active,
            activation="" if active is False else self.activation,
            settings=settings,
        )

    def longest(self, params: PoolingParams) -> int | None:
        """Tokens of the longest text whose chunks are embedded where the context is shorter; None for no chunks."""
        embeds = params.kind is not PoolingKind.ALL and not params.classify and not params.choices
        return self.chunked_tokens if self.chunked_tokens and embeds else None

    @property
    def chunked_tokens(self) -> int:
        """Tokens of the longest text that is embedded in chunks; 0 where none is."""
        chunked = self.settings.enable_chunked_processing
        return (self.settings.max_embed_len or limits.MAX_PROMPT_CHARS) if chunked else 0

    def check_generates(self) -> None:
        """Raises RequestError for a model that cannot continue a prompt."""
        if not self.generates:
            raise self._cannot(
                "generate text", "it embeds, classifies or ranks; send texts to /v1/embeddings or /score"
            )

    def embedding(
        self, dimensions: int | None = None, normalize: bool | None = None, each_token: bool | None = False
    ) -> PoolingParams:
        """What to ask for an embedding, or for one a token; `each_token` None: whichever the model gives.

        Raises:
            RequestError: the model does not embed, has fewer dimensions, or gives no text a single vector.
        """
        if self.labels:
            raise self._cannot("embed texts", "it is a classifier; send the texts to /classify or /score")
        if dimensions is not None and not 1 <= dimensions <= self.size:
            raise ParameterError(
                "dimensions", dimensions, f"from 1 to {self.size}, the size of this model's embeddings"
            )
        if self.kind is PoolingKind.ALL and each_token is False:
            raise self._cannot("give a text a single vector", "it is served with pooling_type ALL: one for each token")
        dimensions = self.settings.dimensions if dimensions is None else dimensions
        kind = PoolingKind.ALL if each_token else self.kind
        chosen = self.normalize if normalize is None else normalize
        return PoolingParams(kind, dimensions=dimensions, normalize=chosen)

    def prompted(
        self, texts: Sequence[str | Sequence[int]], name: str | None = None, prompt: str | None = None
    ) -> list[str | Sequence[int]]:
        """Texts to embed, each behind a `prompt`, or the model's own of that `name`, or its default one.

        Token ids are left as they are, without either.

        Raises:
            ParameterError: both are given, the model has no such prompt, or token ids cannot take one.
        """
        known = self.prompts.texts
        if name is not None and prompt is not None:
            raise ParameterError("prompt_name", name, "only without prompt")
        if name is not None and name not in known:
            raise ParameterError("prompt_name", name, f"this model's: {', '.join(known) or 'none'}")
        chosen = name or self.prompts.default
        before = prompt if prompt is not None else known[chosen] if chosen is not None else ""
        field = "prompt" if prompt is not None else "prompt_name"
        if before and not self.pools_prompts:
            raise ParameterError(field, before, "none, as this model leaves prompts out of its vectors")
        if (prompt or name) and not all(isinstance(text, str) for text in texts):
            raise ParameterError(field, prompt or name, "only together with texts, not with token ids")
        if len(before) * len(texts) > limits.MAX_PROMPT_CHARS:
            told = f"at most {limits.MAX_PROMPT_CHARS // len(texts)} with {len(texts)} texts; send fewer of them"
            raise ParameterError(field, f"{len(before)} characters", told)
        return [before + text if isinstance(text, str) else text for text in texts]

    def classification(self, each_token: bool = False) -> PoolingParams:
        """What to ask for the scores of all labels, of a text or of each of its tokens.

        Raises:
            RequestError: the model has no classification head.
        """
        if not self.labels:
            raise self._cannot("classify texts", f"only a model of an architecture …{CLASSIFIER} can")
        if self.kind is PoolingKind.ALL and not each_token:
            raise self._cannot("classify texts", "it is served with pooling_type ALL: scores are of each token")
        kind = PoolingKind.ALL if each_token else self.kind
        return PoolingParams(kind, classify=True, activation=self.activation)

    def ranking(self) -> PoolingParams | None:
        """What to ask for the score of a pair of texts; the last value is the score. None: embeddings are compared.

        Raises:
            RequestError: the model tells several labels apart, of which none is a score.
        """
        if self.choices:
            return PoolingParams(choices=self.choices, activation="softmax")
        if len(self.labels) > 1:
            raise self._cannot("score pairs of texts", f"it tells {len(self.labels)} labels apart; use /classify")
        return self.classification() if self.labels else None

    def _cannot(self, what: str, why: str) -> RequestError:
        message = f"This model ({self.architecture}) cannot {what}: {why}."
        return RequestError(message, param="model", code="unsupported_task")


def read_pooling(checkpoint: Checkpoint, token_id: Callable[[str], int | None]) -> Pooling:
    """Reads it; `token_id` gives the id of a token by its text.

    Raises:
        CheckpointError: a file names a way of pooling that is not served.
    """
    config = text_config(checkpoint.config)
    architecture = _architecture(checkpoint.config)
    modules = read_modules(checkpoint.path) if checkpoint.path.is_dir() else None
    classifies = architecture.endswith(CLASSIFIER)
    judge = _judge(checkpoint, architecture)
    labels = _labels(checkpoint.config) if classifies else ()
    dense = checkpoint.config.get("dense_layers")
    size = dense[-1]["outputs"] if dense else config.get("hidden_size") or config.get("n_embd") or 1
    return Pooling(
        architecture,
        _kind(checkpoint, architecture, modules),
        modules is None or any(module.kind == "Normalize" for module in modules),
        size if type(size) is int else 1,
        labels,
        _activation(checkpoint.config, len(labels)) if labels else "",
        () if classifies else _choices(checkpoint, _settings(modules, "LogitScore"), judge, token_id),
        architecture.endswith(_GENERATORS),
        PairPrompt(judge.before, judge.question, judge.after, judge.instruction) if judge else None,
        read_prompts(checkpoint.path) if checkpoint.path.is_dir() else Prompts(),
        _settings(modules, "Pooling").get("include_prompt") is not False,
    )


def _settings(modules: tuple[Module, ...] | None, kind: str) -> Mapping[str, Any]:
    """Of the first module of a kind; {} without one."""
    return next((module.settings for module in modules or () if module.kind == kind), {})


def _kind(checkpoint: Checkpoint, architecture: str, modules: tuple[Module, ...] | None) -> PoolingKind:
    metadata, config = checkpoint.metadata, checkpoint.config
    stated = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if isinstance(stated, int) and stated in _GGUF_KINDS:
        return _GGUF_KINDS[stated]
    if settings := _settings(modules, "Pooling"):
        chosen = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
        chosen = chosen or [str(settings.get("pooling_mode"))]
        found = [kind for flag, mode, kind in _MODES if chosen in ([flag], [mode])]
        if not found:
            raise CheckpointError(
                f"{checkpoint.path}: the Pooling module's settings choose {', '.join(chosen)[:200]}; "
                f"served: one of {', '.join(flag for flag, _, _ in _MODES)}."
            )
        return found[0]
    if not is_encoder(config):
        return PoolingKind.LAST
    if architecture.endswith(CLASSIFIER):
        return PoolingKind.MEAN if config.get("classifier_pooling") == "mean" else PoolingKind.CLS
    return PoolingKind.MEAN


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether tokens see those after them."""
    both_ways = text_config(config).get("use_bidirectional_attention") is True
    family = named(_architecture(config))
    return both_ways or (family is not None and family[0].facts.encoder)


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "?"


def _labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("id2label")
    if isinstance(names, Mapping):
        return tuple(str(names.get(str(index), names.get(index, f"LABEL_{index}"))) for index in range(len(names)))
    count = config.get("num_labels", 2)
    return tuple(f"LABEL_{index}" for index in range(count if type(count) is int else 2))


def _activation(config: Mapping[str, Any], labels: int) -> str:
    """sentence-transformers' choice for a cross-encoder, else what the problem's type implies."""
    nested = config.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        kind = str(named).rpartition(".")[2]
        if kind not in _ACTIVATIONS:
            raise CheckpointError(
                f"config.json: the activation {kind[:80]!r} is not served; {', '.join(_ACTIVATIONS)} are."
            )
        return _ACTIVATIONS[kind]
    problem = config.get("problem_type")
    if problem == "regression":
        return ""
    return "sigmoid" if labels == 1 or problem == "multi_label_classification" else "softmax"


def _choices(
    checkpoint: Checkpoint, settings: Mapping[str, Any], judge: Judge | None, token_id: Callable[[str], int | None]
) -> tuple[int, ...]:
    """Ids of "no" and "yes": stated, or, for rerankers whose files say nothing, the family's."""
    ids = [settings.get("false_token_id"), settings.get("true_token_id")]
    words = checkpoint.config.get("classifier_from_token")
    if words is None and judge is not None:
        words = list(judge.words)
    if ids == [None, None] and isinstance(words, list) and len(words) == 2:
        ids = [token_id(str(word)) for word in words]
    return tuple(index for index in ids if index is not None) if None not in ids else ()


def _judge(checkpoint: Checkpoint, architecture: str) -> Judge | None:
    """How a reranker is asked that differs from its family's chat models in its name alone, or by one field."""
    family = named(architecture)
    judge = family[0].facts.judge if family is not None and family[1] != "none" else None
    if judge is None or "classifier_from_token" in checkpoint.config:
        return judge
    return judge if judge.named in checkpoint.path.resolve().name.lower() else None
