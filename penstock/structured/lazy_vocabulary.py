"""A vocabulary that is read once it is wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.structured.grammar_compiler import Vocabulary


class LazyVocabulary:
    """Reads a vocabulary at the first call, in whichever thread that is; others wait for it."""

    def __init__(self, make: Callable[[], Vocabulary]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Vocabulary | None = None

    def __call__(self) -> Vocabulary:
        with self._lock:
            if self._made is None:
                self._made = self._make()
            return self._made
