"""How somebody wants a model to be pulled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from penstock.config.errors import CheckpointError, ConfigError
from penstock.config.resolve import ModelFacts
from penstock.library.outlook import HEADER_PARTS, Announced, Judge, Outlook, gguf_facts
from penstock.library.transfer import Manner, give_up
from penstock.library.web import Web

Progress = Callable[[int, int], None]
"""(bytes that are there, bytes in all)"""


Others = Callable[[ModelFacts], Mapping[str, ModelFacts]]
"""Facts of further quantisations, from those of one."""


class RefusedError(ConfigError):
    """A model that cannot run here."""


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

    def check_gguf(self, web: Web, file: Announced, bytes: int, others: Others = lambda facts: {}) -> None:
        """Asks whether a GGUF file at a server can run here; what came of one that cannot is removed.

        Raises:
            RefusedError: it cannot. CheckpointError: its architecture is not read. Others as `fetch`.
        """
        if self.judge is None:
            return
        try:
            facts = gguf_facts(web, file)
            self.check(Outlook(file.name, bytes, facts, {} if facts is None else others(facts)))
        except (RefusedError, CheckpointError):
            give_up(file.target, file.manner, HEADER_PARTS)
            raise

    def check(self, outlook: Outlook) -> None:
        """Raises RefusedError if the model cannot run here."""
        refused = self.judge(outlook) if self.judge is not None else None
        if refused:
            raise RefusedError(f"{refused} --force pulls it nevertheless.")
