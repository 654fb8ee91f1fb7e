"""Why no more of a prompt was found, as far as who asks may know: what others had is never a reason."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from penstock.core.kv.node import Key, Namespace, Node
from penstock.core.policies.eviction import Evicted

_MOST_SPACES = 64  # that are looked at


def unseen(namespace: Namespace, first: Key, roots: Iterable[Node]) -> str:
    """Why nothing was found of a prompt that begins so: its owner may have had it with other adapters."""
    others = islice(roots, _MOST_SPACES) if isinstance(namespace.owner, tuple) else ()
    own = (root.children.get(namespace.portal) for root in others if isinstance(root.name, str))
    return "other_adapters" if any(node is not None and first in node.children for node in own) else "first_seen"


def diverged(node: Node, key: Key, evicted: Evicted) -> str:
    """Why a block is not found behind a node."""
    return "evicted" if hash((node.path, key)) in evicted else "diverged"


def below_ends(node: Node, key: Key, size: int, evicted: Evicted) -> str:
    """Why what is wanted behind the last node that can be loaded is not there: only whole blocks have copies."""
    if len(key) < size:
        return "partial_block" if key else ""
    return diverged(node, key, evicted)
