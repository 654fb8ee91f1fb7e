"""The codec between engine process and client: every message comes back as it was; nothing else gets through."""

from __future__ import annotations

import math
import pickle

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.adapters import AdapterUse
from penstock.config.engine_stats import EngineStats
from penstock.config.errors import (
    RESULT_TOO_LARGE,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    MemoryPlanError,
    OverloadedError,
    ParameterError,
    PenstockError,
    RequestError,
)
from penstock.config.options import EngineOptions
from penstock.config.resolve import Decision
from penstock.config.sampling import SamplingParams
from penstock.core.policies.pace import Pace
from penstock.core.policies.pause import Control
from penstock.core.protocol import TokenLogprobs
from penstock.core.request import EngineOutput, EngineRequest, FinishReason
from penstock.engine import messages, request_names
from penstock.engine.api import EngineInfo
from penstock.engine.event_sockets import EventSocket
from penstock.engine.messages import MessageError
from penstock.engine.so_far import SoFar

REQUEST = EngineRequest(
    "r", (1, 2, 3),
    SamplingParams(
        n=3, max_tokens=7, min_tokens=2, temperature=1, logit_bias=((5, -1.5),), allowed_token_ids=(1, 5),
        bad_words=("a",), bad_words_ids=((1,), (2, 3)), stop=("x", "é"), stop_token_ids=(4,), seed=-(2**63), logprobs=0,
        banned_strings=("é b",),
    ),
    (2, 4), 2**64 - 1, -3, "salt", "owner", adapters=(AdapterUse("d", "/p", -0.5),),
)  # fmt: skip
INFO = EngineInfo("m", "/p", "A", 1, 2, 3, 4, 5, 6, "float32", "cpu", "exact", (Decision("a", "b", "c"),))
OUTPUT = EngineOutput(
    "r", 1, (5,), (TokenLogprobs(5, -math.inf, 1, ((5, -0.1), (6, -2.5))),), (TokenLogprobs(1, -1.0, 2),),
    FinishReason.STOP, None, 3, 2,
)  # fmt: skip


@pytest.mark.parametrize(
    "command",
    [
        messages.Submit(REQUEST),
        messages.Submit(REQUEST, SoFar(((1, 2), None, ()), 3)),
        messages.Cancel("é" * 100),
        messages.EndReasoning("é"),
        *map(messages.Tell, Control),
        messages.StatsQuery(),
        messages.StatsQuery("é"),
        messages.Attach("1.2", "ipc:///c"),
        messages.Detach("1.2"),
    ],
)
def test_commands_come_back(command: messages.Command) -> None:
    assert messages.decode_command(messages.encode(command)) == command


@pytest.mark.parametrize(
    "event",
    [
        messages.Progress(1, 2**40),
        messages.Ready(INFO),
        messages.Outputs([OUTPUT, EngineOutput("s", 0)]),
        messages.Refused("r", "RequestError", "no", None, "code"),
        messages.Stats(EngineStats(running=1, miss_reasons=(("first_seen", 2),), plan_seconds=0.5)),
        messages.Paced(Pace(0.01, 0.0, 1e-5, 7.5, 512)),
        messages.Unattached("1.2"),
        messages.Heartbeat(),
        messages.Fatal("ConfigError", "no"),
    ],
)
def test_events_come_back(event: messages.Event) -> None:
    decoded = messages.decode_event(messages.encode(event))
    assert decoded == event
    if isinstance(decoded, messages.Outputs):
        assert decoded.outputs[0].finish_reason is FinishReason.STOP


def test_ids_tell_whose_requests_they_are() -> None:
    for client in ("", "0.1", "1.12"):
        for name in ("a", "a/b", "owner:x/y", "1.12/a", "\x011.12/a", "\x01"):
            assert request_names.client_of(request_names.named(client, name)) == client
            assert not client or request_names.named(client, name) == request_names.prefix(client) + name


def test_launch_comes_back() -> None:
    launch = messages.Launch(EngineOptions(model="é", seed=3), "ipc:///a", "ipc:///b", "/work", 7)
    assert messages.decode_launch(messages.encode(launch)) == launch


@pytest.mark.parametrize(
    "error",
    [
        RequestError("no", param="p", code="c"),
        ParameterError("top_p", 2, "at most 1"),
        ContextLengthError("too long", param="prompt"),
        OverloadedError("full"),
    ],
)
def test_refusals_keep_text_status_param_and_code(error: RequestError) -> None:
    frame = messages.encode(messages.refusal("r", error))
    message = messages.decode_event(frame)
    assert isinstance(message, messages.Refused)
    again = messages.refusal_error(message)
    assert (str(again), again.status, again.param, again.code) == (str(error), error.status, error.param, error.code)


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, MemoryPlanError, EngineDeadError])
def test_fatal_errors_keep_their_kind(kind: type[PenstockError]) -> None:
    again = messages.fatal_error(messages.Fatal(kind.__name__, "text"))
    assert type(again) is kind
    assert str(again) == "text"
    assert type(messages.fatal_error(messages.Fatal("SystemExit", "text"))) is EngineDeadError


@given(st.binary(max_size=200))
def test_noise_is_no_message(noise: bytes) -> None:
    for decode in (messages.decode_command, messages.decode_event, messages.decode_launch):
        with pytest.raises(MessageError):
            decode(noise)


@given(st.data())
def test_damaged_frames_never_raise_anything_else(data: st.DataObject) -> None:
    frame = bytearray(messages.encode(messages.Submit(REQUEST)))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        command = messages.decode_command(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    except MessageError:
        return
    assert isinstance(command, messages.Command)


def test_foreign_codecs_are_refused() -> None:
    for frame in (pickle.dumps(REQUEST), b"[" * 100_000, b"\x91" * 1_000_000, messages.encode(messages.Heartbeat())):
        with pytest.raises(MessageError):
            messages.decode_command(frame)


def test_parameters_are_checked_on_the_way_in() -> None:
    frame = messages.encode(messages.Submit(REQUEST))
    damaged = frame.replace(b"\xa5top_k\x00", b"\xa5top_k\xd1\x80\x00")
    assert damaged != frame
    with pytest.raises(MessageError, match="top_k"):
        messages.decode_command(damaged)


def test_what_does_not_fit_is_a_message_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in (messages.Cancel("\ud800"), messages.Progress(2**70, 0)):
        with pytest.raises(MessageError):
            messages.encode(bad)
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 10)
    with pytest.raises(MessageError, match="10 bytes"):
        messages.encode(messages.Cancel("a" * 20))


def test_results_too_long_for_a_message_end_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 1000)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver = context.socket(zmq.PULL)
    receiver.bind("inproc://results")
    events = EventSocket(context, "inproc://results")
    sizes = {"small": 10, "large": 2000, "other": 700, "another": 700}
    events.outputs([EngineOutput(name, 0, pooled=bytes(size)) for name, size in sizes.items()])
    told: list[EngineOutput] = []
    while len(told) < len(sizes):
        event = messages.decode_event(receiver.recv())
        assert isinstance(event, messages.Outputs)
        told += event.outputs
    events.close()
    receiver.close()
    context.term()
    assert [output.request_id for output in told] == list(sizes)
    assert {output.request_id: len(output.pooled or b"") for output in told} == {**sizes, "large": 0}
    assert {output.request_id for output in told if output.error == RESULT_TOO_LARGE} == {"large"}
