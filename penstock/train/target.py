"""The model that a head learns to draft for: its hidden states, logits and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from penstock.config.errors import CheckpointError, ConfigError
from penstock.config.options import EngineOptions
from penstock.config.ranks import check_alone
from penstock.evaluate.scoring import Progress, Scorer
from penstock.layers.batch import Batch
from penstock.layers.embedding import Embedding
from penstock.layers.part import FINAL, layer_input
from penstock.models.draft_heads import TargetFacts
from penstock.models.registry import Model
from penstock.startup.draft_head import check_target
from penstock.startup.engine_spec import make_engine_spec

_FEWEST: Final = 3  # layers of a target
_SHALLOW: Final = 8  # layers of a target below which taps lie further out


def tapped(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs an EAGLE-3 head reads: an early one, the middle, a late one."""
    return (1, layers // 2, layers - 1) if layers < _SHALLOW else (2, layers // 2, layers - 3)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the target says of an answer and its prompt, T tokens.

    Attributes:
        tokens: [T].
        taps: what the tapped layers were given, side by side, [T, 3 * hidden_size] float32.
        final: what its logits are made of, [T, hidden_size] float32.
        embeddings: of the tokens, [T, hidden_size] float32.
    """

    tokens: Tensor
    taps: Tensor
    final: Tensor
    embeddings: Tensor


def check_drafted_for(options: EngineOptions, method: str) -> None:
    """Raises ConfigError for a model for which no head of this kind can be trained; only its headers are read.

    Raises:
        PenstockError: as for an engine.
    """
    check_alone(options, "heads are trained")
    spec = make_engine_spec(replace(options, speculative_config=None))
    model = spec.model
    try:
        check_target(model, method)
    except CheckpointError as error:
        raise ConfigError(f"no head of --method {method} can be trained for {options.model}: {error}") from None
    _taps(model)
    assert model.head is not None
    final, between = int(model.head.weight.shape[1]), spec.facts.hidden_size
    if method != "medusa" and final != between:
        raise ConfigError(
            f"{options.model} makes its logits of {final} elements and has {between} between its layers, and an EAGLE "
            "head reads both as one; train --method medusa."
        )


class Target:
    """The loaded model; `close` frees it.

    Attributes:
        facts: what a head has to agree with.
        device: where tensors lie.
    """

    def __init__(self, options: EngineOptions, context: int, progress: Progress | None = None) -> None:
        """Loads it with room for `context` tokens.

        Raises:
            PenstockError: as for an engine; also if it makes no text.
        """
        self._scorer = Scorer(options, context, taps=_taps, progress=progress)
        model = self._scorer.model
        assert model.head is not None
        self.layers = tapped(len(model.blocks))
        self.facts = TargetFacts(int(model.head.weight.shape[1]), model.vocab_size, len(model.blocks))
        self.device = torch.device(self._scorer.spec.options.torch_device)
        self._plain = Embedding(self._scorer.spec.kernels, model.embedding.weight)

    def read(self, tokens: Sequence[int]) -> Reading:
        """Runs the model over tokens, as many as there is room for."""
        batch = self._scorer.batch(tokens)
        states = self._scorer.states(batch)
        found = {name: state.float().clone() for name, state in states.items()}
        taps = torch.cat([found[layer_input(layer)] for layer in self.layers], 1)
        return Reading(torch.tensor(tokens, device=self.device), taps, found[FINAL], self._embedded(batch))

    def logits(self, first: int, last: int) -> Tensor:
        """Logits [last - first, vocab] behind these positions of what was read last."""
        return self._scorer.logits_behind(first, last).clone()

    def head_table(self) -> Tensor:
        """What the final states are multiplied with, [vocab, hidden_size] float32: read off the head itself."""
        model, size = self._scorer.model, self.facts.hidden_size
        with torch.inference_mode():
            rows = torch.eye(size, dtype=model.dtype, device=self.device)
            table = torch.cat([model.logits(part, _indices(part)).float() for part in torch.split(rows, 64)])
        return table.T.contiguous().clone()

    def embeddings(self, tokens: Sequence[int]) -> Tensor:
        """Rows [T, hidden_size] float32 of its embedding, as heads read them: not scaled, nor with positions."""
        return self._embedded(self._scorer.batch(tokens))

    def _embedded(self, batch: Batch) -> Tensor:
        with torch.inference_mode():
            rows = self._plain(batch).float()
        return rows.clone()

    def close(self) -> None:
        self._scorer.close()


def _indices(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)


def _taps(model: Model) -> tuple[str, ...]:
    if len(model.blocks) < _FEWEST:
        raise ConfigError(
            f"the model has {len(model.blocks)} layers; heads are trained for models of {_FEWEST} or more."
        )
    return (*(layer_input(layer) for layer in tapped(len(model.blocks))), FINAL)
