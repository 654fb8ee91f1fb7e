"""The requests of a session, each with what it goes on from: a tree, kept as plain data. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from penstock.config.errors import ParameterError, RequestError, format_value
from penstock.server.dialects.sglang.sessions.schema import SessionParams

MOST_TOKENS: Final = 1 << 18  # of a session, which is read and written as a whole
MOST_REQUESTS: Final = 4096
Node = dict[str, Any]
"""A request: its `rid`, its `parent`'s or None, how many tokens it has `kept` of what that one had, its `own` tokens,
and its `output`, None as long as it runs."""


def going_on_from(nodes: Sequence[Node], params: SessionParams) -> Node | None:
    """The request that another goes on from; None for one that begins anew.

    Raises:
        RequestError: there is none, or it has not ended.
    """
    if params.rid is None:
        return None
    node = next((node for node in nodes if node["rid"] == params.rid), None)
    if node is None:
        raise ParameterError("session_params.rid", params.rid, "the rid of a request of the session")
    if node["output"] is None and not params.replace:
        message = f"The request {format_value(params.rid)} of the session has not ended; wait for it, or send replace."
        raise RequestError(message, param="session_params.rid", code="session_busy")
    return node


def tokens_of(nodes: Sequence[Node], node: Node | None, *, output: bool = True) -> list[int]:
    """What a request had: its prompt and, with `output`, its answer."""
    by_rid = {one["rid"]: one for one in nodes}
    path = []
    while node is not None:
        path.append(node)
        node = by_rid[node["parent"]] if node["parent"] is not None else None
    found: list[int] = []
    for place, one in enumerate(reversed(path), 1):
        del found[one["kept"] :]  # not sliced: a long chain is as much work as its tokens
        found += one["own"]
        if output or place < len(path):
            found += one["output"] or ()
    return found


def replaced(nodes: Sequence[Node], params: SessionParams) -> tuple[list[Node], list[str]]:
    """The requests that stay where one begins, and the ids of those that run and have to end."""
    if not params.replace:
        return list(nodes), []
    gone: set[str | None] = set()
    for node in nodes:  # a child stands behind its parent
        parent = node["parent"]
        if params.rid is None or parent == params.rid or (parent is not None and parent in gone):
            gone.add(node["rid"])
    replaced = gone | {params.rid}
    ended = [node["rid"] for node in nodes if node["output"] is None and node["rid"] in replaced]
    return [node for node in nodes if node["rid"] not in gone], ended


def with_request(nodes: Sequence[Node], node: Node, capacity: int) -> list[Node]:
    """The requests of a session with one more.

    Raises:
        RequestError: its id is another's, or the session is full.
    """
    if any(one["rid"] == node["rid"] for one in nodes):
        raise ParameterError("rid", node["rid"], "an id that no other request of the session has")
    held = sum(len(one["own"]) + len(one["output"] or ()) for one in nodes) + len(node["own"])
    most = min(capacity, MOST_TOKENS)
    if held > most or len(nodes) >= MOST_REQUESTS:
        message = (
            f"The session is full: it holds {most} tokens of at most {MOST_REQUESTS} requests (capacity_of_str_len). "
            "Close it, or send replace."
        )
        raise RequestError(message, param="session_params.id", code="session_full")
    return [*nodes, node]


def with_output(nodes: Sequence[Node], rid: str, output: Sequence[int]) -> list[Node]:
    """The requests, one of which has ended."""
    return [{**node, "output": list(output)} if node["rid"] == rid else node for node in nodes]
