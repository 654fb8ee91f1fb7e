"""Scores of whole texts under a model: perplexity, and how far two models' predictions lie apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.config.ranks import check_alone
from penstock.config.sampling import SamplingParams
from penstock.core.protocol import NewSequence, ScheduledTokens
from penstock.kernels.api import KernelSet
from penstock.layers.batch import Batch
from penstock.models.registry import Model, build_model
from penstock.startup.build_runner import load, make_parts
from penstock.startup.claim import Claim
from penstock.startup.engine_spec import EngineSpec, make_engine_spec

Progress = Callable[[int, int], None]
_LOGIT_ROWS = 128  # logits are made for that many positions at a time: [128, vocab] float32


@dataclass(frozen=True, slots=True)
class Window:
    """One stretch of a text that is run at once.

    Attributes:
        tokens: its token ids.
        first: position in the window of the first token that is scored; at least 1.
    """

    tokens: tuple[int, ...]
    first: int


def halved_windows(tokens: Sequence[int], context: int, bos: int | None = None) -> list[Window]:
    """Stretches of `context` tokens side by side; the second half of each is scored, as llama.cpp does.

    Args:
        tokens: the text.
        context: tokens of a stretch.
        bos: replaces the first token of each stretch, for models that begin every text with it.

    Raises:
        ConfigError: the text is shorter than two stretches.
    """
    count = len(tokens) // context
    if count < 2:
        raise ConfigError(
            f"the text has {len(tokens)} tokens; at least {2 * context} are needed for --context {context}. "
            "Give a longer text or a smaller --context."
        )
    head = () if bos is None else (bos,)
    return [
        Window((*head, *tokens[start + len(head) : start + context]), context // 2 + 1)
        for start in range(0, count * context, context)
    ]


def strided_windows(tokens: Sequence[int], context: int, stride: int) -> list[Window]:
    """Overlapping stretches, each `stride` tokens on; every token but the first is scored once.

    Each is seen after at least context - stride tokens, those of the first stretch aside.

    Raises:
        ConfigError: the text is shorter than two tokens, or the stride longer than the context.
    """
    if not 1 <= stride <= context:
        raise ConfigError(f"--stride is {stride}; allowed: 1 to {context}, the tokens of a stretch (--context).")
    if len(tokens) < 2:
        raise ConfigError(f"the text has {len(tokens)} tokens; at least 2 are needed. Give a longer text.")
    windows = [Window(tuple(tokens[:context]), 1)]
    done = min(context, len(tokens))
    while done < len(tokens):
        end = min(done + min(stride, context - 1), len(tokens))  # the first scored token needs one before it
        start = max(0, end - context)
        windows.append(Window(tuple(tokens[start:end]), done - start))
        done = end
    return windows


class Predictor(Protocol):
    """What predicts the tokens of a text."""

    @property
    def vocab_size(self) -> int:
        """Logits a token."""

    def logits(self, window: Window) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (logits [n, vocab] float32, the tokens [n] they predict) of a stretch, valid until the next."""


class Scorer:
    """A loaded model with room for one stretch of text; `close` frees it."""

    def __init__(
        self,
        options: EngineOptions,
        context: int,
        *,
        kernels: Callable[[EngineSpec], KernelSet] | None = None,
        taps: Callable[[Model], Sequence[str]] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Loads a model.

        Args:
            options: what model, and how to compute; limits are set for one sequence.
            context: longest stretch, tokens.
            kernels: gives other ops than the options would.
            taps: names the hidden states that `states` gives, as in `layers.part.ModelPart`.
            progress: called with (bytes read, bytes in all).

        Raises:
            PenstockError: as for an engine; also if the model predicts no tokens.
        """
        check_alone(options, "texts are scored")
        size = options.block_size
        blocks = -(-context // size) + 1
        single: dict[str, Any] = {
            "max_num_seqs": 1,
            "max_num_batched_tokens": context,
            "max_model_len": context,
            "kv_blocks": blocks,
            "pack_cache": "off",
        }
        self._claim = Claim(replace(options, **single, enable_prefix_caching=False))
        spec = make_engine_spec(self._claim.options)
        if spec.model.head is None:
            raise ConfigError(f"{spec.facts.name} embeds or classifies; only models that predict tokens can be scored.")
        self._claim.settle(spec.options)
        if kernels is not None:
            used, dtype = kernels(spec), spec.model.dtype
            model = build_model(spec.checkpoint.config, used, dtype=dtype, max_model_len=context)
            spec = spec.with_model(model, used)
        self.spec, self.kv_types, self.notes = load(spec, progress)
        self.model: Model = spec.model
        self._taps = () if taps is None else tuple(taps(self.model))
        parts = make_parts(self.spec, self.kv_types, 1, _LOGIT_ROWS, self._taps)
        self._memory, self._builder = parts[:2]
        self._executor = parts[2]
        self._blocks = tuple(tuple(range(1, blocks)) for _ in spec.groups)

    @property
    def vocab_size(self) -> int:
        """Logits a token."""
        return self.model.vocab_size

    @torch.inference_mode()
    def logits(self, window: Window) -> Iterator[tuple[Tensor, Tensor]]:
        """Runs a stretch; yields (logits [n, vocab] float32, the tokens [n] they predict), valid until the next."""
        self._executor.forward(self.batch(window.tokens))
        targets = torch.tensor(window.tokens)
        last = len(window.tokens) - 1
        for start in range(window.first - 1, last, _LOGIT_ROWS):
            rows = np.arange(start, min(start + _LOGIT_ROWS, last), dtype=np.int64)
            yield self._executor.logits(rows).cpu(), targets[torch.from_numpy(rows + 1)]

    @torch.inference_mode()
    def states(self, batch: Batch) -> dict[str, Tensor]:
        """Runs a stretch that `batch` has made; gives its hidden states by tap, [T, hidden_size] each, valid until the
        next."""
        self._executor.forward(batch)
        return {tap: self._executor.tap(tap) for tap in self._taps}

    @torch.inference_mode()
    def logits_behind(self, first: int, last: int) -> Tensor:
        """Logits [last - first, vocab] float32 behind positions first … last - 1 of the stretch that was run last."""
        return self._executor.logits(np.arange(first, last, dtype=np.int64))

    def batch(self, tokens: Sequence[int]) -> Batch:
        """A stretch as one step."""
        known = tuple(tokens)
        self._builder.add_row(NewSequence(0, "score", 0, known, (), 0, self._blocks, SamplingParams()))
        empty = ((),) * len(self._blocks)
        span = ScheduledTokens(0, 0, known, len(known), 0, sample=False, new_blocks=empty)
        return self._builder.build([span], range(len(known)))

    def run(self, window: Window) -> None:
        """Runs a stretch and its logits; nothing is returned, whoever listens to ops has what it needs."""
        for _ in self.logits(window):
            pass

    def close(self) -> None:
        self._memory.close()


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well a model predicts a text.

    Attributes:
        tokens: tokens scored.
        mean_nll: mean negative log-likelihood, natural logarithm.
        standard_error: of that mean, taking tokens as independent.
    """

    tokens: int
    mean_nll: float
    standard_error: float

    @property
    def value(self) -> float:
        """exp(mean_nll)."""
        return math.exp(self.mean_nll)

    @property
    def error(self) -> float:
        """Standard error of the value."""
        return self.value * self.standard_error


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far a model's predictions lie from a reference's, token by token.

    Attributes:
        mean, standard_error, median, percentile_99, maximum: of KL(reference ‖ model), nats.
        same_top: share of tokens where both hold the same token for the most probable.
        log_ratio_error: standard error of the logarithm of the perplexities' ratio; far below that of either
            perplexity, because both models read the same tokens.
        mean_probability_change, rms_probability_change: of the probability of the true token, model less reference.
    """

    mean: float
    standard_error: float
    median: float
    percentile_99: float
    maximum: float
    same_top: float
    log_ratio_error: float
    mean_probability_change: float
    rms_probability_change: float


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")


def _perplexity(nlls: list[Tensor]) -> Perplexity:
    values = torch.cat(nlls).numpy()
    if not np.isfinite(values).all():
        raise ConfigError("the model gives logits that are not finite; its weights are damaged.")
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return Perplexity(len(values), float(values.mean()), spread / math.sqrt(len(values)))


def perplexity(scorer: Predictor, windows: Sequence[Window], progress: Progress | None = None) -> Perplexity:
    """Scores a text.

    Args:
        scorer: the model.
        windows: from `halved_windows` or `strided_windows`.
        progress: called with (windows done, windows in all).

    Raises:
        ConfigError: logits are not finite.
    """
    nlls: list[Tensor] = []
    for done, window in enumerate(windows, start=1):
        nlls += [_nll(logits, targets) for logits, targets in scorer.logits(window)]
        if progress is not None:
            progress(done, len(windows))
    return _perplexity(nlls)


def compare(
    scorer: Predictor, reference: Predictor, windows: Sequence[Window], progress: Progress | None = None
) -> tuple[Perplexity, Perplexity, Divergence]:
    """Scores a text under a model and a reference.

    Returns:
        The model's and the reference's perplexity, and their divergence.

    Raises:
        ConfigError: the two have different vocabularies, or logits are not finite.
    """
    if scorer.vocab_size != reference.vocab_size:
        raise ConfigError(
            f"the models have {scorer.vocab_size} and {reference.vocab_size} tokens; "
            "only models of one vocabulary can be compared."
        )
    own: list[Tensor] = []
    theirs: list[Tensor] = []
    divergences: list[Tensor] = []
    same = 0
    for done, window in enumerate(windows, start=1):
        for (logits, targets), (wanted, _) in zip(scorer.logits(window), reference.logits(window), strict=True):
            model_log, reference_log = logits.double().log_softmax(-1), wanted.double().log_softmax(-1)
            own.append(-model_log.gather(1, targets[:, None])[:, 0])
            theirs.append(-reference_log.gather(1, targets[:, None])[:, 0])
            divergences.append((reference_log.exp() * (reference_log - model_log)).sum(-1).clamp_(min=0))
            same += int((logits.argmax(-1) == wanted.argmax(-1)).sum())
        if progress is not None:
            progress(done, len(windows))
    return _perplexity(own), _perplexity(theirs), _divergence(own, theirs, divergences, same)


def _divergence(own: list[Tensor], theirs: list[Tensor], divergences: list[Tensor], same: int) -> Divergence:
    kl = torch.cat(divergences).numpy()
    difference = (torch.cat(own) - torch.cat(theirs)).numpy()
    change = torch.cat(own).neg().exp().numpy() - torch.cat(theirs).neg().exp().numpy()
    return Divergence(
        mean=float(kl.mean()),
        standard_error=float(kl.std() / math.sqrt(len(kl))),
        median=float(np.median(kl)),
        percentile_99=float(np.percentile(kl, 99)),
        maximum=float(kl.max()),
        same_top=same / len(kl),
        log_ratio_error=float(difference.std() / math.sqrt(len(kl))),
        mean_probability_change=float(change.mean()),
        rms_probability_change=float(np.sqrt((change**2).mean())),
    )
