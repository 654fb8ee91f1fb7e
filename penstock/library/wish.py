"""How somebody wants a model to be pulled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.config.errors import ConfigError
from penstock.library.outlook import Judge, Outlook
from penstock.library.transfer import Manner

Progress = Callable[[int, int], None]
"""(bytes that are there, bytes in all)"""


@dataclass(frozen=True, slots=True)
class Wish:
    """How a model is pulled.

    Attributes:
        progress: told while bytes come.
        say: gets a sentence for the person.
        judge: asked before much is loaded; None takes every model.
        insecure: plain HTTP to registries that are not on this machine.
        manner: streams and parts of files.
    """

    progress: Progress = lambda done, total: None
    say: Callable[[str], None] = lambda line: None
    judge: Judge | None = None
    insecure: bool = False
    manner: Manner = field(default_factory=Manner)

    def manner_for(self, total: int) -> Manner:
        """The manner, with progress of so many bytes."""
        done = [0]  # counted by several threads; a bar that lags for a moment harms nobody

        def told(count: int) -> None:
            done[0] += count
            self.progress(min(done[0], total), total)

        return replace(self.manner, told=told, say=self.say)

    def check(self, outlook: Outlook) -> None:
        """Raises ConfigError if the model cannot run here."""
        refused = self.judge(outlook) if self.judge is not None else None
        if refused:
            raise ConfigError(f"{refused} --force pulls it nevertheless.")
