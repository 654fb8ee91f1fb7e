"""What clients see when ranks of one model are killed, stopped or slowed at random moments, under streams.

A real `penstock serve` of one model in two processes, by `-tp` and by `-pp`. Streams of different prompts, lengths,
temperatures and seeds run; at a moment drawn at random one of the processes gets what the kind says:

- `kill`: SIGKILL to the rank that follows;
- `lead`: SIGKILL to the rank that leads, with the scheduler;
- `stop`: SIGSTOP to the rank that follows, SIGCONT after some seconds, every tenth time after 30;
- `slow`: SIGSTOP and SIGCONT in turn, so that it has a tenth of its time, for some seconds.

Passes if each stream ended with the text of an undisturbed run or with one clean error, within the stated time, and
all processes that the killed ones had are gone, with nothing left in /dev/shm. Runs can be split: `--go-on` adds to
what the results have.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from benchmarks.kills import apart, left
from benchmarks.report import arguments, report
from benchmarks.server_child import ServerChild, serve

KINDS: Final = ("kill", "lead", "stop", "slow")
DEGREES: Final = {"tp": ("-tp", "2"), "pp": ("-pp", "2")}
LIMIT_S: Final = 90.0  # in which all streams are over, besides what a rank was stopped
_PART_S: Final = 0.01  # that a slowed rank runs; it is stopped nine times as long
_SLOW_S: Final = 4.0
_LONG_S: Final = 30.0  # of every tenth stop
_GONE_S: Final = 10.0
_LOOK_S: Final = 0.02
_WORDS: Final = ("Once upon a time", "The weather today", "A table for two", "What is", "In Berkeley", "Tell me")


@dataclass(frozen=True)
class Asked:
    """One stream's request.

    Attributes:
        prompt, tokens, temperature, seed: of it.
    """

    prompt: str
    tokens: int
    temperature: float
    seed: int

    def body(self) -> dict[str, Any]:
        """Of POST /v1/completions."""
        return {
            "prompt": self.prompt, "max_tokens": self.tokens, "temperature": self.temperature, "seed": self.seed,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip


def load(streams: int, most: int) -> list[Asked]:
    """So many requests, the same ones each time; the longest is answered with `most` tokens."""
    drawn = random.Random(7)
    return [
        Asked(
            f"{drawn.choice(_WORDS)} {number} " * drawn.randint(1, 12),
            most if number == 0 else drawn.randint(most // 8, most),
            drawn.choice((0.0, 0.7, 1.1)),
            number,
        )
        for number in range(streams)
    ]


async def read(url: str, asked: Asked) -> tuple[str, str]:
    """The text of a stream, and how it ended: "whole", "cut", or the error that was told."""
    text, ended = "", ""
    with suppress(httpx.HTTPError):
        async with (
            httpx.AsyncClient(trust_env=False, timeout=2 * LIMIT_S) as client,
            client.stream("POST", f"{url}/v1/completions", json=asked.body()) as answer,
        ):
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return text, ended or "whole"
                told = line.removeprefix("data: ")
                if not told.startswith("{"):
                    continue
                event = json.loads(told)
                if "error" in event:
                    ended = str(event["error"]["message"])
                else:
                    text += event["choices"][0]["text"]
    return text, ended or "cut"


@dataclass
class Found:
    """What came of the moments of one kind, of one degree.

    Attributes:
        moments: tried.
        whole: streams that ended with the undisturbed text.
        errors: streams that ended with one error, by what it says.
        cut, other: streams without an end, and with other text than the undisturbed one's beginning.
        hung: streams that were not over in time.
        behind: processes that outlived the engine they were of.
        longest_s: until all streams of a moment were over, less the time in which a rank was stopped.
        again_s: longest time from a kill until an engine answered again.
    """

    moments: int = 0
    whole: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    other: int = 0
    hung: int = 0
    behind: int = 0
    longest_s: float = 0.0
    again_s: float = 0.0

    @property
    def wrong(self) -> int:
        """What may not be."""
        return self.cut + self.other + self.hung + self.behind

    def add(self, other: Found) -> Found:
        """Both together."""
        errors = {
            said: self.errors.get(said, 0) + other.errors.get(said, 0) for said in {**self.errors, **other.errors}
        }
        return Found(
            self.moments + other.moments, self.whole + other.whole, errors, self.cut + other.cut,
            self.other + other.other, self.hung + other.hung, self.behind + other.behind,
            max(self.longest_s, other.longest_s), max(self.again_s, other.again_s),
        )  # fmt: skip


class Disturbance:
    """Disturbs one server at one moment after the other."""

    def __init__(self, server: ServerChild, asked: Sequence[Asked], drawn: random.Random) -> None:
        self._server, self._asked = server, asked
        self._drawn = drawn
        self._texts: list[str] = []
        self._takes_s = 0.0

    async def measure(self) -> None:
        """Runs the streams undisturbed, twice, to know their texts and how long they take."""
        for _ in range(2):
            began = time.monotonic()
            told = await asyncio.gather(*(read(self._server.url, one) for one in self._asked))
            self._takes_s = time.monotonic() - began
            if any(ended != "whole" for _, ended in told) or (
                self._texts and self._texts != [text for text, _ in told]
            ):
                raise RuntimeError(f"undisturbed streams differ or fail: {[ended for _, ended in told]}")
            self._texts = [text for text, _ in told]

    def ranks(self) -> tuple[psutil.Process, list[psutil.Process]]:
        """The process that leads, and those that follow. Raises StopIteration where it is not there."""
        lead = self._server.engine()
        return lead, [one for one in lead.children() if "worker_process" in " ".join(one.cmdline())]

    async def disturb(self, kind: str, number: int) -> Found:
        """One moment; `number` counts those of the kind."""
        found = Found(1)
        lead, followers = self.ranks()
        reading = [asyncio.create_task(read(self._server.url, one)) for one in self._asked]
        began = time.monotonic()
        await asyncio.sleep(self._drawn.uniform(0, self._takes_s))
        held = await self._do(kind, number, lead, followers)
        did = time.monotonic()
        _, late = await asyncio.wait(reading, timeout=LIMIT_S)
        found.longest_s = time.monotonic() - began - held
        for task in late:
            task.cancel()
        found.hung = len(late)
        for task, text in zip(reading, self._texts, strict=True):
            if task not in late:
                self._enter(found, *task.result(), text)
        if kind in ("kill", "lead"):
            _, alive = psutil.wait_procs([lead, *followers], timeout=_GONE_S)
            found.behind = len(alive)
            await self._answering()
            found.again_s = time.monotonic() - did
        return found

    async def _do(self, kind: str, number: int, lead: psutil.Process, followers: Sequence[psutil.Process]) -> float:
        """Does it; how long the rank was held, seconds."""
        victim = self._drawn.choice(followers)
        if kind in ("kill", "lead"):
            os.kill(lead.pid if kind == "lead" else victim.pid, signal.SIGKILL)
            return 0.0
        began = time.monotonic()
        try:
            if kind == "stop":
                os.kill(victim.pid, signal.SIGSTOP)
                await asyncio.sleep(_LONG_S if number % 10 == 9 else self._drawn.uniform(0.5, 3.0))
            while kind == "slow" and time.monotonic() - began < _SLOW_S:
                os.kill(victim.pid, signal.SIGSTOP)
                await asyncio.sleep(9 * _PART_S)
                os.kill(victim.pid, signal.SIGCONT)
                await asyncio.sleep(_PART_S)
        finally:
            with suppress(ProcessLookupError):
                os.kill(victim.pid, signal.SIGCONT)
        return time.monotonic() - began if kind == "stop" else 0.0

    @staticmethod
    def _enter(found: Found, text: str, ended: str, expected: str) -> None:
        if not expected.startswith(text):
            found.other += 1
        elif ended == "whole" and text == expected:
            found.whole += 1
        elif ended in ("whole", "cut"):
            found.cut += 1
        else:
            found.errors[ended] = found.errors.get(ended, 0) + 1

    async def _answering(self) -> None:
        """Waits until there is an engine with all its ranks that answers."""
        until = time.monotonic() + LIMIT_S
        async with httpx.AsyncClient(trust_env=False, timeout=LIMIT_S) as client:
            while time.monotonic() < until:
                with suppress(httpx.HTTPError, psutil.Error, StopIteration):
                    if (await client.get(f"{self._server.url}/readyz")).status_code == 200 and self.ranks()[1]:
                        return
                await asyncio.sleep(_LOOK_S)
        raise RuntimeError(f"no engine answers {LIMIT_S:.0f} s after a rank was killed")


def memory(server: ServerChild) -> dict[str, float]:
    """What a server's processes have: MB of their own, and descriptors of the one that speaks HTTP."""
    own = 0.0
    for process in (server.http, *server.http.children(recursive=True)):
        with suppress(psutil.Error):
            own += process.memory_full_info().uss / 1e6
    return {
        "host_mb": server.http.memory_full_info().uss / 1e6, "all_mb": own, "host_descriptors": server.http.num_fds(),
    }  # fmt: skip


async def trial(server: ServerChild, chosen: Any, numbers: Sequence[int], until: float) -> dict[str, Any]:
    """These moments of each kind, as many as there is time for."""
    kinds = chosen.kinds.split(",")
    disturbance = Disturbance(server, load(chosen.streams, chosen.tokens), random.Random(chosen.seed + numbers[0]))
    await disturbance.measure()
    found = {kind: Found() for kind in kinds}
    before = memory(server)
    for number in numbers:
        for kind in kinds:
            if time.monotonic() < until:
                found[kind] = found[kind].add(await disturbance.disturb(kind, number))
    await disturbance.measure()  # it still says what it said
    return {"found": found, "memory": [before, memory(server)]}


def tried(degree: str, chosen: Any, numbers: Sequence[int], until: float) -> dict[str, Any]:
    """One server of a degree, disturbed, and what is left of it."""
    shared = set(os.listdir("/dev/shm"))
    flags = [chosen.model, *DEGREES[degree], "--threads", "2", "--max-model-len", "1024", "--max-num-seqs", "32"]
    with apart() as folder:
        with serve(flags) as server:
            there = [server.http, *server.http.children(recursive=True)]
            found = asyncio.run(trial(server, chosen, numbers, until))
            there += server.http.children(recursive=True)
        return {**found, "left": left(folder, there, shared)}


def _before(path: Path) -> dict[str, Any]:
    with suppress(FileNotFoundError):
        known: dict[str, Any] = json.loads(path.read_text())
        return known
    return {}


def main(given: Sequence[str] | None = None) -> None:
    """Runs it; fails if a stream was cut, hung or changed, or something is left."""
    parser = arguments(__doc__)
    parser.add_argument("--model", default="penstock-concierge")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=600, help="of the longest answer")
    parser.add_argument("--moments", type=int, default=100, help="of each kind, as far as there is time")
    parser.add_argument("--each", type=int, default=5, help="moments of each kind of a server, before it is a new one")
    parser.add_argument("--first", type=int, default=0, help="number of the first one, where runs are split")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no moment is begun")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--degrees", default=",".join(DEGREES))
    parser.add_argument("--go-on", action="store_true", help="add to what the results have")
    chosen = parser.parse_args(given)
    runs: dict[str, Any] = _before(chosen.results / "rank_kills.json").get("runs", {}) if chosen.go_on else {}
    degrees, began = chosen.degrees.split(","), time.monotonic()
    failed = False
    for place, degree in enumerate(degrees, 1):
        until = began + chosen.seconds * place / len(degrees)
        known = runs.setdefault(degree, {"kinds": {}, "memory": [], "left": []})
        last = chosen.first + chosen.moments
        for first in range(chosen.first, last, chosen.each):
            if time.monotonic() > until:
                break
            told = tried(degree, chosen, range(first, min(last, first + chosen.each)), until)
            for kind, found in told["found"].items():
                known["kinds"][kind] = vars(Found(**known["kinds"].get(kind, {})).add(found))
                failed = failed or bool(found.wrong)
            known["memory"].append(told["memory"])
            known["left"] += told["left"]
            failed = failed or bool(told["left"])
    rows = [
        (
            f"-{degree} 2", kind, one["moments"], one["whole"], sum(one["errors"].values()), one["cut"] + one["hung"],
            one["other"], one["behind"], one["longest_s"], one["again_s"] or "-",
        )
        for degree, run in runs.items()
        for kind, one in run["kinds"].items()
    ]  # fmt: skip
    columns = (
        "processes", "kind", "moments", "streams whole, as undisturbed", "with one error", "cut or hung", "other text",
        "processes left", "longest until all streams were over, s", "until an engine answered again, s",
    )  # fmt: skip
    figures = {"streams": chosen.streams, "tokens": chosen.tokens, "limit_s": LIMIT_S, "runs": runs}
    report("rank_kills", chosen.results, figures, columns, rows)
    if failed:
        raise SystemExit("failed: see the table")


if __name__ == "__main__":
    main()
