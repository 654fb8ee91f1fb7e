"""Aho and Corasick's automaton, which finds several strings in one pass (Communications of the ACM 18(6), 1975)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(slots=True)
class Node:
    """A state of the automaton: a text that begins some string."""

    depth: int
    children: dict[str, Node] = field(default_factory=dict)
    fallback: Node | None = None  # the longest proper suffix that also begins a string
    match: str | None = None  # the longest string that ends here

    def after(self, char: str) -> Node:
        """The state behind one more character; linear in the text, however the characters come."""
        state = self
        while char not in state.children and state.fallback is not None:
            state = state.fallback
        return state.children.get(char, state)


@lru_cache(maxsize=8)  # the prompts of a call have the same; a node is never changed once all are there
def automaton(strings: tuple[str, ...]) -> Node:
    """The state before any text; linear in the strings, none of which is empty."""
    root = Node(0)
    for string in strings:
        node = root
        for char in string:
            node = node.children.setdefault(char, Node(node.depth + 1))
        node.match = string
    queue = deque([root])
    while queue:
        node = queue.popleft()
        for char, child in node.children.items():
            fallback = node.fallback
            while fallback is not None and char not in fallback.children:
                fallback = fallback.fallback
            child.fallback = root if fallback is None else fallback.children[char]
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root
