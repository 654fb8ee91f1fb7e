"""How a worker process talks: one JSON line in for a work, one JSON line out with the time of every token.

A worker is started with one argument, a JSON object with the model's path and settings. It says `ready`, then answers
each work `{"prompts": [[token id, ...], ...], "new": n}` with `{"started": s, "tokens": [[s, ...], ...]}`, in seconds
of one monotonic clock, one list of arrival times for each prompt. Whatever libraries print goes to standard error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
Times = tuple[float, list[list[float]]]
Run = Callable[[Sequence[Sequence[int]], int], Times]
"""Continues each prompt by exactly so many tokens; returns the start and every token's arrival."""
Load = Callable[[Mapping[str, Any]], tuple[Run, dict[str, str]]]
"""Loads the model; returns how to run it and facts worth reporting (version, KV type)."""


def die_with_parent() -> None:
    """Has Linux kill this process when its parent ends: a stopped worker would never see the end of its input."""
    ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def serve(load: Load) -> None:
    """Loads what the command line names and answers works until standard input ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(what: Mapping[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    run, facts = load(json.loads(sys.argv[1]))
    answer({"ready": facts})
    for line in sys.stdin:
        asked = json.loads(line)
        started, tokens = run(asked["prompts"], asked["new"])
        answer({"started": started, "tokens": tokens})
