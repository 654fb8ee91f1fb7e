"""The time and memory one rendering of a chat template may use."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Final

from jinja2.utils import Namespace

from penstock.config import limits
from penstock.config.errors import TemplateError

_WORK: Final = 16 * limits.TEMPLATE_MAX_CHARS  # characters and nodes one rendering may produce or walk over
_MAX_NESTING: Final = 4 * limits.MAX_JSON_DEPTH


class Budget:
    """What one rendering, in one thread, may still spend.

    Its time is the thread's own: on a busy machine, or one that was stopped meanwhile, it gets no less.
    """

    __slots__ = ("_deadline", "_left")

    def __init__(self) -> None:
        self._deadline = time.thread_time() + limits.TEMPLATE_TIMEOUT_S
        self._left = _WORK

    def spend(self, amount: int) -> None:
        """Raises TemplateError once time or memory is used up."""
        self._left -= amount
        if self._left < 0:
            raise TemplateError(
                f"the chat template builds more than {_WORK} characters in all. Use a template that does less work."
            )
        if time.thread_time() > self._deadline:
            raise TemplateError(
                f"the chat template ran for more than {limits.TEMPLATE_TIMEOUT_S:g} s. "
                "Use a simpler template or a shorter conversation."
            )

    def spend_deep(self, value: object, indent: int = 0, each: int = 0, escape: int = 1) -> int:
        """Charges a nested value for every node below it, as often as it would be written out; returns the charge.

        Args:
            value: any value of a template.
            indent: characters written before each node, for each level.
            each: characters written around each node.
            escape: characters written for each of a text.

        Raises:
            TemplateError: it is nested so deeply that Python's own recursion over it could end the process.
        """
        before = self._left
        stack: list[tuple[object, int]] = [(value, 1)]
        while stack:
            item, depth = stack.pop()
            if depth > _MAX_NESTING:
                raise TemplateError(f"the chat template nests a value deeper than {_MAX_NESTING} levels.")
            kind = type(item)
            if kind is str or kind is bytes:
                self.spend(1 + each + len(item) * escape + depth * indent)  # type: ignore[arg-type]
                continue
            self.spend(1 + each + depth * indent)
            if isinstance(item, Mapping):
                stack.extend((part, depth + 1) for pair in item.items() for part in pair)
            elif isinstance(item, (list, tuple, set, frozenset)):
                stack.extend((part, depth + 1) for part in item)
            elif isinstance(item, Namespace):
                stack.append((item._Namespace__attrs, depth + 1))
            elif isinstance(item, str):
                self.spend(len(item) * escape)
            elif kind is int:
                self.spend(item.bit_length() // 3)  # type: ignore[attr-defined]
        return before - self._left
