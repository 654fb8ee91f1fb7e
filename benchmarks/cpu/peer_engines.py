"""The engines as things that can be asked for a work: workers kept loaded and stopped between works, and llama.cpp."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cpu.peer_install import ISA_VARIABLES, Places
from benchmarks.cpu.peer_models import SHAPES, gguf_path, hf_path, openvino_path
from benchmarks.cpu.peer_works import AT_LOAD, CLASSES, Work, llama_command, llama_rate, rate

REPOSITORY = Path(__file__).resolve().parents[2]
_LEAST_TOKEN = 1000  # below lie single bytes


@dataclass(frozen=True, slots=True)
class Run:
    """What holds for every engine of one run.

    Attributes:
        places: where peers and models are.
        threads: of each engine.
        priority: niceness of each engine's scheduling group, None to leave it; a negative one needs the right to it.
        penstock: name → AsyncLLM options of every Penstock engine to measure.
    """

    places: Places
    threads: int
    priority: int | None = None
    penstock: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"penstock": {}})

    def environment(self) -> dict[str, str]:
        """Of every engine's process: its threads, and the instruction set it is held to."""
        return {**os.environ, **ISA_VARIABLES[self.places.isa], "OMP_NUM_THREADS": str(self.threads)}


class Engine(Protocol):
    """One engine with one model."""

    facts: Mapping[str, str]

    def measure(self, work: Work, seed: int) -> float:
        """Tokens a second of one repetition."""

    def close(self) -> None:
        """Ends its process."""


def prompts(work: Work, vocab: int, seed: int) -> list[list[int]]:
    """Random token ids, others for every seed."""
    draw = random.Random(f"{work.name} {seed}")
    return [[draw.randrange(_LEAST_TOKEN, vocab - 300) for _ in range(work.prompt)] for _ in range(work.sequences)]


def set_priority(pid: int, niceness: int | None) -> None:
    """Niceness of the scheduling group that a session's processes share (`nice` alone has no effect across groups)."""
    group = Path(f"/proc/{pid}/autogroup")
    if niceness is not None and group.exists():
        group.write_text(str(niceness), encoding="utf-8")


class Worker:
    """A process of `benchmarks.cpu.workers`; stopped by a signal whenever it is not asked, so that it costs no time."""

    def __init__(self, run: Run, python: Path, module: str, setup: Mapping[str, Any], vocab: int) -> None:
        self._vocab = vocab
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.cpu.workers.{module}", json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=REPOSITORY,
            env=run.environment(),
            start_new_session=True,
        )
        set_priority(self._process.pid, run.priority)
        try:
            self.facts: Mapping[str, str] = self._answer()["ready"]
        except BaseException:
            self.close()
            raise
        os.killpg(self._process.pid, signal.SIGSTOP)

    def measure(self, work: Work, seed: int) -> float:
        """As Engine."""
        return rate(work, *self.ask(prompts(work, self._vocab, seed), work.new))

    def ask(self, asked: Sequence[Sequence[int]], new: int) -> tuple[float, list[list[float]]]:
        """Continues all prompts at once by `new` tokens; the start and every token's arrival, in seconds.

        Raises:
            RuntimeError: the process has ended; the end of its log is in the message.
        """
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": asked, "new": new}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        os.killpg(self._process.pid, signal.SIGSTOP)
        return answer["started"], answer["tokens"]

    def close(self) -> None:
        """As Engine."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"the worker ended with {self._process.returncode}: {self._log.read()[-2000:]}")
        return json.loads(line)


class LlamaCpp:
    """llama.cpp through its own benchmark programs, which load, warm up and measure once a call."""

    def __init__(self, run: Run, model: Path) -> None:
        self.facts: Mapping[str, str] = {"version": "llama-cpp-python 0.3.36's tree", "kv": "f16 (the peer's default)"}
        self._run = run
        self._model = model

    def measure(self, work: Work, seed: int) -> float:
        """As Engine.

        Raises:
            RuntimeError: the program failed; the end of its log is in the message.
        """
        program, arguments = llama_command(work, str(self._model), self._run.threads)
        command = [str(self._run.places.llama(program)), *arguments]
        return llama_rate(work, run_quietly(command, self._run.priority))

    def close(self) -> None:
        """Nothing runs between calls."""


def run_quietly(command: list[str], priority: int | None) -> str:
    """Standard output of a program in a session of its own.

    Raises:
        RuntimeError: it failed; the end of its log is in the message.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    set_priority(process.pid, priority)
    printed, log = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}: {log[-2000:]}")
    return printed


def penstock_model(run: Run, model: str, kind: str) -> Path:
    """What Penstock loads: the GGUF file, as llama.cpp, or the bfloat16 folder for a format made at load."""
    shape = SHAPES[model]
    return hf_path(run.places, shape) if kind in AT_LOAD else gguf_path(run.places, shape, kind)


def penstock_options(run: Run, name: str, kind: str) -> dict[str, Any]:
    """An engine's options, and the wish for a format made at load."""
    return {**({"quantize": kind} if kind in AT_LOAD else {}), **run.penstock[name]}


def llama_model(run: Run, model: str, kind: str) -> Path:
    """What llama.cpp loads for a format."""
    return gguf_path(run.places, SHAPES[model], CLASSES[kind]["llama.cpp"])


def peer_folder(run: Run, name: str, model: str, kind: str) -> Path:
    """What OpenVINO or vLLM loads for a format."""
    shape = SHAPES[model]
    return openvino_path(run.places, shape, CLASSES[kind][name]) if name == "openvino" else hf_path(run.places, shape)


def open_engine(run: Run, name: str, model: str, kind: str) -> Engine | None:
    """Loads an engine with the file or folder nearest to a format; None where there is none for it."""
    if name == "llama.cpp":
        file = llama_model(run, model, kind)
        return LlamaCpp(run, file) if file.exists() else None
    return open_worker(run, name, model, kind)


def open_worker(
    run: Run, name: str, model: str, kind: str, *, caching: bool = False, length: int = 4608, sequences: int = 32
) -> Worker | None:
    """Loads a Python engine, with or without prefix caching, for prompts and answers up to `length` tokens together."""
    setup: dict[str, Any] = {"threads": run.threads}
    vocab, cache = SHAPES[model].vocab, 3 if caching else 1
    if name in run.penstock:
        source = penstock_model(run, model, kind)
        if not source.exists():
            return None
        options = {"max_model_len": length, "enable_prefix_caching": caching, "kv_cache_memory": cache << 30}
        setup |= {"model": str(source), "options": options | penstock_options(run, name, kind)}
        return Worker(run, Path(sys.executable), "penstock", setup, vocab)
    folder = peer_folder(run, name, model, kind)
    if not folder.exists():
        return None
    setup |= {"model": str(folder), "cache_gib": cache, "caching": caching, "length": length, "sequences": sequences}
    return Worker(run, run.places.python(name), name, setup, vocab)
