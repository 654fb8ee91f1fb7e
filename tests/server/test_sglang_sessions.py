"""SGLang's sessions: what a request sends is what is new, and what it goes on from is held here."""

from __future__ import annotations

import random
import time
from typing import Any

import httpx
import pytest

from penstock.config.errors import RequestError
from penstock.server.dialects.sglang.sessions.history import (
    MOST_REQUESTS,
    Node,
    going_on_from,
    replaced,
    tokens_of,
    with_output,
    with_request,
)
from penstock.server.dialects.sglang.sessions.schema import SessionParams
from tests.server.support import Running
from tests.server.test_sglang import generated, post


def opened(server: Running, **body: Any) -> str:
    answer = post(server, "/open_session", {"capacity_of_str_len": 1000, **body})
    assert answer.status_code == 200, answer.text
    session = answer.json()
    assert isinstance(session, str)
    return session


def said(server: Running, session: str, ids: list[int], name: str | None = None, **params: Any) -> dict[str, Any]:
    told = generated(
        server, input_ids=ids, rid=name, sampling_params={"max_new_tokens": 3}, return_prompt_token_ids=True,
        session_params={"id": session, **params},
    )  # fmt: skip
    assert isinstance(told, dict)
    return told


def test_each_request_goes_on_from_the_one_it_names(server: Running) -> None:
    session = opened(server)
    first = said(server, session, [5, 6, 7], "one")
    assert first["prompt_token_ids"] == [5, 6, 7] and len(first["output_ids"]) == 3
    history = [5, 6, 7, *first["output_ids"]]
    second = said(server, session, [8], "two", rid="one")
    assert second["prompt_token_ids"] == [*history, 8]
    assert said(server, session, [9], "fork", rid="one")["prompt_token_ids"] == [*history, 9], "a branch"
    whole = [*history, 8, *second["output_ids"]]
    assert said(server, session, [9], rid="two")["prompt_token_ids"] == [*whole, 9]
    assert said(server, session, [9], rid="two", offset=2)["prompt_token_ids"] == [5, 6, 9]
    assert said(server, session, [9], rid="two", offset=-1)["prompt_token_ids"] == [*whole[:-1], 9]
    dropped = said(server, session, [9], rid="two", drop_previous_output=True)
    assert dropped["prompt_token_ids"] == [*history, 8, 9]
    assert said(server, session, [4])["prompt_token_ids"] == [4], "it begins anew"


def test_a_request_is_the_same_as_with_all_its_tokens(server: Running) -> None:
    session = opened(server)
    first = said(server, session, [5, 6, 7], "one")
    second = said(server, session, [8], "two", rid="one")
    alone = generated(server, input_ids=second["prompt_token_ids"], sampling_params={"max_new_tokens": 3})
    assert alone["output_ids"] == second["output_ids"] and first["meta_info"]["id"] == "one"


def test_what_is_replaced_is_gone(server: Running) -> None:
    session = opened(server)
    first = said(server, session, [5], "one")
    said(server, session, [6], "two", rid="one")
    said(server, session, [7], "three", rid="two")
    again = said(server, session, [8], "again", rid="one", replace=True)
    assert again["prompt_token_ids"] == [5, *first["output_ids"], 8]
    for gone in ("two", "three"):
        refused = post(server, "/generate", {"input_ids": [1], "session_params": {"id": session, "rid": gone}})
        assert refused.status_code == 400 and "session_params.rid" in refused.json()["error"]["message"]
    assert said(server, session, [9], "new", replace=True)["prompt_token_ids"] == [9]
    refused = post(server, "/generate", {"input_ids": [1], "session_params": {"id": session, "rid": "one"}})
    assert refused.status_code == 400


def test_a_session_ends(server: Running) -> None:
    session = opened(server, session_id="mine")
    assert session == "mine"
    assert post(server, "/open_session", {"capacity_of_str_len": 9, "session_id": "mine"}).status_code == 400
    assert post(server, "/close_session", {"session_id": "mine"}).status_code == 200
    refused = post(server, "/generate", {"text": "a", "session_params": {"id": "mine"}})
    assert refused.status_code == 400 and "There is no session" in refused.json()["error"]["message"]
    brief = opened(server, session_id="mine", timeout=0.001)
    time.sleep(0.002)
    refused = post(server, "/generate", {"text": "a", "session_params": {"id": brief}})
    assert refused.status_code == 400 and "There is no session" in refused.json()["error"]["message"]
    assert opened(server, session_id="mine") == "mine", "its time is over"


def test_a_session_is_bounded_and_one_request_at_a_time(server: Running) -> None:
    session = opened(server, capacity_of_str_len=8)
    said(server, session, [5, 6, 7, 8], "one")
    for body, why in (
        ({"input_ids": [5, 6], "session_params": {"id": session, "rid": "one"}}, "is full"),
        ({"input_ids": [5], "rid": "one", "session_params": {"id": session}}, "no other request"),
        ({"text": ["a", "b"], "session_params": {"id": session}}, "one prompt and one answer"),
        ({"input_ids": [[1], [2]], "session_params": {"id": session}}, "one prompt and one answer"),
        ({"text": "a", "sampling_params": {"n": 2}, "session_params": {"id": session}}, "one prompt and one answer"),
    ):
        refused = post(server, "/generate", body)
        assert refused.status_code == 400 and why in refused.json()["error"]["message"], body
    assert generated(server, input_ids=[5], session_params={}), "none is named"


def test_a_stream_is_part_of_its_session(server: Running) -> None:
    session = opened(server)
    body = {"input_ids": [5], "rid": "one", "stream": True, "session_params": {"id": session}}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    second = said(server, session, [6], rid="one")
    assert second["prompt_token_ids"][0] == 5 and len(second["prompt_token_ids"]) > 3


def node(rid: str, parent: str | None, kept: int, own: list[int], output: list[int] | None = None) -> Node:
    return {"rid": rid, "parent": parent, "kept": kept, "own": own, "output": output}


def test_a_request_that_runs_is_gone_on_from_when_it_has_ended() -> None:
    nodes = [node("a", None, 0, [1])]
    with pytest.raises(RequestError, match="has not ended"):
        going_on_from(nodes, SessionParams(id="s", rid="a"))
    assert going_on_from(nodes, SessionParams(id="s", rid="a", replace=True)) == nodes[0]
    assert replaced(nodes, SessionParams(id="s", rid="a", replace=True)) == (nodes, ["a"])
    assert replaced(nodes, SessionParams(id="s", replace=True)) == ([], ["a"])
    assert tokens_of(with_output(nodes, "a", [2]), {**nodes[0], "output": [2]}) == [1, 2]


def test_a_long_session_is_as_much_work_as_its_tokens() -> None:
    nodes: list[Node] = []
    rng = random.Random(3)
    expected: list[int] = []
    for index in range(MOST_REQUESTS):
        kept = rng.choice([len(expected), len(expected), max(0, len(expected) - 3)])
        own, output = [index] * 30, [-index] * 20
        nodes = [*nodes, node(f"r{index}", f"r{index - 1}" if index else None, kept, own, output)]
        expected = [*expected[:kept], *own, *output]
    began = time.process_time()
    assert tokens_of(nodes, nodes[-1]) == expected
    assert time.process_time() - began < 2.0
    with pytest.raises(RequestError, match="is full"):
        with_request(nodes, node("x", None, 0, [1]), 1 << 30)
