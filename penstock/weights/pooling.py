"""How a checkpoint pools: what its files and those of sentence-transformers say of embedding, classifying and ranking.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from penstock.config.errors import CheckpointError, ParameterError, RequestError
from penstock.core.pooling import PoolingKind, PoolingParams
from penstock.weights.checkpoint import Checkpoint, text_config
from penstock.weights.readers.files import parse_object, read_object

CLASSIFIER = "ForSequenceClassification"
# sentence-transformers' names, the old flag and the new value, for what is served.
_MODES = (
    ("pooling_mode_cls_token", "cls", PoolingKind.CLS),
    ("pooling_mode_mean_tokens", "mean", PoolingKind.MEAN),
    ("pooling_mode_lasttoken", "lasttoken", PoolingKind.LAST),
)
_GGUF_KINDS = {0: PoolingKind.ALL, 1: PoolingKind.MEAN, 2: PoolingKind.CLS, 3: PoolingKind.LAST, 4: PoolingKind.CLS}
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
    """

    architecture: str
    kind: PoolingKind
    normalize: bool
    size: int
    labels: tuple[str, ...] = ()
    activation: str = ""
    choices: tuple[int, ...] = ()

    def embedding(
        self, dimensions: int | None = None, normalize: bool | None = None, each_token: bool = False
    ) -> PoolingParams:
        """What to ask for an embedding, or for one a token.

        Raises:
            RequestError: the model does not embed, or has fewer dimensions.
        """
        if self.labels:
            raise self._cannot("embed texts", "it is a classifier; send the texts to /classify or /score")
        if dimensions is not None and not 1 <= dimensions <= self.size:
            raise ParameterError(
                "dimensions", dimensions, f"from 1 to {self.size}, the size of this model's embeddings"
            )
        kind = PoolingKind.ALL if each_token else self.kind
        chosen = self.normalize if normalize is None else normalize
        return PoolingParams(kind, dimensions=dimensions, normalize=chosen)

    def classification(self) -> PoolingParams:
        """What to ask for the scores of all labels.

        Raises:
            RequestError: the model has no classification head.
        """
        if not self.labels:
            raise self._cannot("classify texts", f"only a model of an architecture …{CLASSIFIER} can")
        return PoolingParams(self.kind, classify=True, activation=self.activation)

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
    modules = _modules(checkpoint)
    classifies = architecture.endswith(CLASSIFIER)
    labels = _labels(checkpoint.config) if classifies else ()
    size = config.get("hidden_size") or config.get("n_embd") or 1
    return Pooling(
        architecture,
        _kind(checkpoint, architecture, modules),
        modules is None or "Normalize" in modules,
        size if type(size) is int else 1,
        labels,
        _activation(checkpoint.config, len(labels)) if labels else "",
        () if classifies else _choices(checkpoint, modules or {}, token_id),
    )


def _modules(checkpoint: Checkpoint) -> dict[str, Mapping[str, Any]] | None:
    """The settings of sentence-transformers' modules by type; None without modules.json."""
    file = checkpoint.path / "modules.json"
    if not checkpoint.path.is_dir() or not file.is_file():
        return None
    found: dict[str, Mapping[str, Any]] = {}
    listed = parse_object(b'{"modules":' + file.read_bytes() + b"}", str(file))["modules"]
    for entry in listed if isinstance(listed, list) else ():
        path, kind = entry.get("path", ""), str(entry.get("type")).rpartition(".")[2]
        parts = PurePosixPath(str(path)).parts
        if ".." in parts or str(path).startswith("/") or "\\" in str(path):
            raise CheckpointError(f"{file} names the path {str(path)[:80]!r}; a folder below the model's is needed.")
        found[kind] = read_object(checkpoint.path / path / "config.json", missing_ok=True) if path else {}
    return found


def _kind(checkpoint: Checkpoint, architecture: str, modules: Mapping[str, Mapping[str, Any]] | None) -> PoolingKind:
    metadata, config = checkpoint.metadata, checkpoint.config
    stated = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if isinstance(stated, int) and stated in _GGUF_KINDS:
        return _GGUF_KINDS[stated]
    if modules and "Pooling" in modules:
        settings = modules["Pooling"]
        for flag, mode, kind in _MODES:
            if settings.get(flag) is True or settings.get("pooling_mode") == mode:
                return kind
        chosen = [name for name, value in settings.items() if name.startswith("pooling_mode") and value]
        raise CheckpointError(
            f"{checkpoint.path}: the Pooling module's settings choose {', '.join(chosen) or 'nothing'}; "
            f"served: {', '.join(flag for flag, _, _ in _MODES)}."
        )
    if not is_encoder(config):
        return PoolingKind.LAST
    if architecture.endswith(CLASSIFIER):
        return PoolingKind.MEAN if config.get("classifier_pooling") == "mean" else PoolingKind.CLS
    return PoolingKind.MEAN


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether tokens see those after them."""
    both_ways = text_config(config).get("use_bidirectional_attention") is True
    return both_ways or "bert" in _architecture(config).lower()


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
    checkpoint: Checkpoint, modules: Mapping[str, Mapping[str, Any]], token_id: Callable[[str], int | None]
) -> tuple[int, ...]:
    """Ids of "no" and "yes": stated, or, for Qwen3-Reranker, whose files say nothing, known by the model's name."""
    settings = modules.get("LogitScore", {})
    ids = [settings.get("false_token_id"), settings.get("true_token_id")]
    words = checkpoint.config.get("classifier_from_token")
    named = "Qwen3ForCausalLM" in (checkpoint.config.get("architectures") or ()) and (
        "reranker" in checkpoint.path.resolve().name.lower()
    )
    if words is None and named:
        words = ["no", "yes"]
    if ids == [None, None] and isinstance(words, list) and len(words) == 2:
        ids = [token_id(str(word)) for word in words]
    return tuple(index for index in ids if index is not None) if None not in ids else ()
