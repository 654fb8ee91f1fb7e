"""What masks and samplers leave of a row's logits, as the reference computes it, for those who want it told.

Only a server that tells processed log-probabilities needs it: the draw itself is made elsewhere, from the same numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.config.samplers import LEARNING
from penstock.kernels.reference.chain import draw, left_by_chain
from penstock.kernels.reference.sampling import ReferenceRow, candidates, masked_logits
from penstock.kernels.sampling import RowSettings

Floats = npt.NDArray[np.float32]

_LARGEST = float(np.finfo(np.float32).max)
_LEAST_TEMPERATURE = 1e-30


class ProcessedRow:
    """A row as the reference has it. Where its last sampler learns, so does this, from the same draws."""

    def __init__(self, settings: RowSettings) -> None:
        self._row = ReferenceRow(settings, list(settings.generated_ids), settings.state)

    def extend(self, token: int) -> None:
        """Takes a token as generated."""
        self._row.extend(token)

    def left(self, logits: Floats, position: int, mask: npt.NDArray[np.uint32] | None) -> Floats:
        """Logits [V] after masks, penalties, temperature and filters, -inf for what cannot be drawn.

        Args:
            logits: [V], the model's own (not modified), from which one token can be drawn.
            position: absolute, of the token that is drawn.
            mask: the grammar's, as in `Sampler.begin`.
        """
        row, settings = self._row, self._row.settings
        masked = masked_logits(logits, row, mask)
        if settings.chain:
            history = [*settings.prompt_ids, *row.generated]
            found = left_by_chain(masked, settings, history, position, row.state)
            ids, values = found.ids, found.values
            if settings.chain[-1].name in LEARNING:
                draw(found)
                row.state = tuple(found.state)
        elif settings.temperature == 0.0:
            return masked
        else:
            left = candidates(masked, settings)
            ids, values = left.ids, left.logits.astype(np.float64) / max(settings.temperature, _LEAST_TEMPERATURE)
        out = np.full(len(logits), -np.inf, np.float32)
        out[ids] = np.clip(values, -_LARGEST, _LARGEST)
        return out
