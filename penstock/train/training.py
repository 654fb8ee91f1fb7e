"""Trains a draft head on answers of its target, step after step; a training that was ended can go on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from penstock.config.errors import ConfigError
from penstock.train.answers import Answer
from penstock.train.nets import DraftNet
from penstock.train.settings import TrainSettings
from penstock.train.target import Target

_TOLD = "training"  # what tells of it, among the arrays of a file
_LATER = 0.8  # weight of a draft's loss over that of the draft before it (EAGLE-3's code)
_CLIPPED = 1.0  # norm of a step's gradients
_WARM = 0.03  # share of the steps in which the rate rises


@dataclass(frozen=True, slots=True)
class StepLoss:
    """What a step has found.

    Attributes:
        step, steps: how many are done, and are to be done.
        by_draft: cross-entropy against the target's probabilities, nats, by draft.
    """

    step: int
    steps: int
    by_draft: tuple[float, ...]


class Training:
    """A head, its optimiser and how far they have come.

    Attributes:
        done, steps: as in StepLoss.
    """

    def __init__(
        self,
        net: DraftNet,
        target: Target,
        answers: Sequence[Answer],
        settings: TrainSettings,
        drafted: Tensor | None = None,
    ) -> None:
        """`drafted`: the target's ids of the tokens that the head can draft, [n]; None for all."""
        self.net = net.to(target.device)
        self._target, self._settings = target, settings
        self._answers = answers
        self._drafted = drafted if drafted is None else drafted.to(target.device)
        self._optimizer = torch.optim.AdamW(net.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
        self._of_epoch = -(-len(answers) // settings.batch_size)
        self.done, self.steps = 0, self._of_epoch * settings.epochs

    def run(self, told: Callable[[StepLoss], bool]) -> None:
        """Goes on until all steps are done, or `told` says no."""
        while self.done < self.steps:
            losses = self._step()
            self.done += 1
            if not told(StepLoss(self.done, self.steps, losses)):
                return

    def _step(self) -> tuple[float, ...]:
        settings = self._settings
        epoch, index = divmod(self.done, self._of_epoch)
        order = torch.randperm(len(self._answers), generator=_generator(settings.seed, epoch))
        chosen = order[index * settings.batch_size :][: settings.batch_size].tolist()
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * _rate(self.done / self.steps)
        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros(self.net.drafts)
        for place, number in enumerate(chosen):
            total += self._learn(self._answers[number], (settings.seed, self.done, place)) / len(chosen)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), _CLIPPED)
        self._optimizer.step()
        return tuple(total.tolist())

    def _learn(self, answer: Answer, seeds: tuple[int, ...]) -> Tensor:
        """Adds the gradients of one answer; gives the losses by draft."""
        reading = self._target.read(answer.tokens)
        first, last = len(answer.prompt) - 1, len(answer.tokens) - 2  # starts behind which there is something to draft
        count = min(self._settings.starts, last - first)
        begin = first + int(torch.randint(last - first - count + 1, (1,), generator=_generator(*seeds)))
        starts = torch.arange(begin, begin + count, device=self._target.device)
        logits = self._target.logits(begin + 1, min(begin + count + self.net.drafts, len(answer.tokens) - 1))
        wanted = logits.softmax(-1)
        if self._drafted is not None:
            wanted = wanted[:, self._drafted]
        losses = list[Tensor]()
        for draft, guessed in enumerate(self.net.chain(reading, starts)):
            known = max(0, min(count, len(wanted) - draft))
            logs = functional.log_softmax(guessed[:known].float(), -1)
            losses.append(-(wanted[draft : draft + known] * logs).sum() / count)
        weighed = torch.stack([loss * _LATER**draft for draft, loss in enumerate(losses)]).sum()
        (weighed / self._settings.batch_size).backward()  # type: ignore[no-untyped-call]
        return torch.stack(losses).detach().cpu()

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """Keeps all of it in a file that is whole or not there; `facts` tell what it is a training of."""
        told = np.frombuffer(json.dumps({**facts, "done": self.done}).encode(), np.uint8)
        arrays = {name: value.detach().cpu().numpy() for name, value in self._state().items()}
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.savez(file, allow_pickle=False, **{_TOLD: told, **arrays})
        os.replace(partial, path)

    def resume(self, path: Path, facts: dict[str, Any]) -> None:
        """Goes on where `save` has left off.

        Raises:
            ConfigError: the file cannot be read, or is another training's.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                found = json.loads(arrays[_TOLD].tobytes())
                done = found.pop("done")
                if found != facts:
                    other = sorted(name for name in facts.keys() | found.keys() if facts.get(name) != found.get(name))
                    raise ConfigError(
                        f"{path.parent} holds a training with other settings ({', '.join(other)}). Go on with the same "
                        "ones, begin anew with --force, or choose another --output."
                    )
                with torch.no_grad():
                    for name, value in self._state().items():
                        value.copy_(torch.from_numpy(arrays[name]))
            self.done = int(done)
        except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
            raise ConfigError(f"{path} cannot be gone on with: {error}. Begin anew with --force.") from None

    def _state(self) -> dict[str, Tensor]:
        """Weights and what the optimiser keeps of each; zeros before the first step."""
        found = dict[str, Tensor]()
        for name, weight in self.net.named_parameters():
            kept = self._optimizer.state[weight]
            if not kept:
                kept |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(weight)}
                kept["exp_avg_sq"] = torch.zeros_like(weight)
            found |= {f"weight.{name}": weight} | {f"{part}.{name}": value for part, value in kept.items()}
        return found


def _generator(*seeds: int) -> torch.Generator:
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % (1 << 62)
    return torch.Generator().manual_seed(mixed)


def _rate(part: float) -> float:
    """Of the highest learning rate, behind this part of the training: a rise, then half a cosine down to a tenth."""
    if part < _WARM:
        return (part + 1e-3) / _WARM
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (part - _WARM) / (1 - _WARM)))
