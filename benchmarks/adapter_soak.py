"""Adapters that come and go under load: random loads, unloads, requests and cancels on a real server.

Every whole answer is compared with what its adapter answered alone. Passes if none is another's, nothing failed, every
block is free afterwards, no prefix is shared between adapters, and the engine's memory grew by less than `MOST_GROWTH`
over the second half.
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

from benchmarks.server_child import ServerChild, serve
from penstock.config.names import BUNDLED_MODEL
from penstock.weights.open import bundled_model_path, open_checkpoint

ADAPTERS, RANK, TOKENS, WORKERS, MOST_NAMES = 24, 8, 16, 12, 40
MOST_GROWTH = 48 * 2**20  # bytes
PROMPTS = tuple(f"{word} and then" for word in ("Once upon a time", "The captain said", "Dear guest", "In the town"))
FLAGS = (
    *(BUNDLED_MODEL, "--enable-lora", "--max-loras", "4", "--max-cpu-loras", "8", "--max-lora-rank", str(RANK)),
    *("--kv-blocks", "300"),
)


@dataclass(slots=True)
class Found:
    """What happened.

    Attributes:
        compared, cancelled, gone, loaded, unloaded, refused: answers that were whole, that were left, whose name had
            gone; names that came and went; loads of what is no adapter of this model.
        wrong: what should not have been, in words.
        memory: (seconds since the start, bytes of the engine).
    """

    compared: int = 0
    cancelled: int = 0
    gone: int = 0
    loaded: int = 0
    unloaded: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)


def write_adapters(folder: Path) -> list[Path]:
    """Adapters that change what the bundled model says, and one with values that are no numbers."""
    matrices = {
        name.removesuffix(".weight"): info.shape
        for name, info in open_checkpoint(bundled_model_path()).tensors.items()
        if name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight"))
    }
    places = []
    for number in range(ADAPTERS + 1):
        drawn = np.random.default_rng(number)
        tensors = {}
        for stem, (outputs, inputs) in matrices.items():
            tensors[f"base_model.model.{stem}.lora_A.weight"] = drawn.standard_normal((RANK, inputs)).astype(np.float32)
            up = drawn.standard_normal((outputs, RANK)) * (np.nan if number == ADAPTERS else 0.02)
            tensors[f"base_model.model.{stem}.lora_B.weight"] = up.astype(np.float32)
        place = folder / str(number)
        place.mkdir()
        (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": RANK}))
        save_file(tensors, place / "adapter_model.safetensors")
        places.append(place)
    return places


class Soak:
    """One server, its adapters, and what they answer alone."""

    def __init__(self, child: ServerChild, client: httpx.AsyncClient, places: list[Path], seed: int) -> None:
        self._child, self._client, self._places = child, client, places
        self._draw = random.Random(seed)
        self._alone: dict[tuple[int, int], str] = {}
        self._names: dict[str, int] = {}  # which adapter each has, -1 for the model's own
        self._number = 0
        self.found = Found()

    async def run(self, seconds: float) -> Found:
        await self._learn()
        until = time.monotonic() + seconds
        self._names = {self._base: -1}
        tasks = [self._ask_on(until) for _ in range(WORKERS)]
        await asyncio.gather(self._change(until), self._watch(until, seconds), *tasks)
        await self._settle()
        return self.found

    async def _learn(self) -> None:
        """What every adapter answers, alone."""
        self._base = (await self._client.get("/v1/models")).json()["data"][0]["id"]
        for index in range(-1, ADAPTERS):
            name = self._base if index < 0 else "alone"
            if index >= 0:
                await self._load("alone", index, again=index > 0)
            for prompt in range(len(PROMPTS)):
                answer = (await self._client.post("/v1/completions", json=_body(name, prompt))).json()
                if "choices" not in answer:
                    raise RuntimeError(f"{name} does not answer: {answer}")
                self._alone[index, prompt] = answer["choices"][0]["text"]
        answers = {tuple(self._alone[index, p] for p in range(len(PROMPTS))) for index in range(-1, ADAPTERS)}
        if len(answers) <= ADAPTERS:
            raise RuntimeError("two adapters answer alike: nothing would show whose an answer is")
        await self._client.post("/v1/unload_lora_adapter", json={"lora_name": "alone"})
        self.found.loaded = 0

    async def _load(self, name: str, index: int, *, again: bool = False) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(self._places[index]), "load_inplace": again}
        self.found.loaded += 1
        return await self._client.post("/v1/load_lora_adapter", json=body)

    async def _change(self, until: float) -> None:
        """Names come and go."""
        while time.monotonic() < until:
            choice, named = self._draw.random(), [name for name, index in self._names.items() if index >= 0]
            if choice < 0.05:
                answer = await self._load("bad", ADAPTERS)
                self.found.refused += answer.status_code == 400
                self._expect(answer.status_code == 400, f"a bad adapter was answered {answer.status_code}")
            elif named and (choice < 0.35 or len(named) >= MOST_NAMES):
                name = self._draw.choice(named)
                del self._names[name]
                answer = await self._client.post("/v1/unload_lora_adapter", json={"lora_name": name})
                self.found.unloaded += 1
                self._expect(answer.status_code == 200, f"unloading {name}: {answer.text}")
            else:
                self._number += 1
                name, index = f"n{self._number}", self._draw.randrange(ADAPTERS)
                answer = await self._load(name, index)
                self._expect(answer.status_code == 200, f"loading {name}: {answer.text}")
                self._names[name] = index
            await asyncio.sleep(self._draw.random() * 0.1)

    async def _ask_on(self, until: float) -> None:
        while time.monotonic() < until:
            name = self._draw.choice(list(self._names))
            await self._ask(name, self._names[name], self._draw.randrange(len(PROMPTS)))

    async def _ask(self, name: str, index: int, prompt: int) -> None:
        leave_after = self._draw.randrange(1, 6) if self._draw.random() < 0.3 else None
        text, events = "", 0
        async with self._client.stream("POST", "/v1/completions", json=_body(name, prompt, stream=True)) as answer:
            if answer.status_code == 404 and name not in self._names:
                self.found.gone += 1
                return
            if answer.status_code != 200:
                self._expect(False, f"{name}: {answer.status_code} {(await answer.aread())[:200]!r}")
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    self._expect(False, f"{name}: {event['error']}")
                    return
                text += event["choices"][0]["text"]
                events += 1
                if events == leave_after:
                    self.found.cancelled += 1
                    return
        expected = self._alone[index, prompt]
        self.found.compared += 1
        self._expect(text == expected, f"{name} (adapter {index}) said {text!r} to {prompt}, alone {expected!r}")

    async def _watch(self, until: float, seconds: float) -> None:
        while (left := until - time.monotonic()) > 0:
            self.found.memory.append((seconds - left, self._child.engine().memory_info().rss))
            await asyncio.sleep(min(1.0, max(left, 0.05)))

    async def _settle(self) -> None:
        """Nothing is held by what is over, and a prefix is its adapter's alone."""
        for name in [name for name, index in self._names.items() if index >= 0]:
            await self._client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        for name, metric in (("sequences", "penstock_requests_running"), ("blocks", "penstock_kv_cache_usage_ratio")):
            for _ in range(600):
                if not (left := await asyncio.to_thread(self._child.metric, metric)):
                    break
                await asyncio.sleep(0.1)
            self._expect(not left, f"{name} are held: {metric} is {left}")
        await self._client.post("/reset_prefix_cache")
        left = await asyncio.to_thread(self._child.metric, "penstock_kv_blocks_cached")
        self._expect(not left, f"{left} blocks stay cached")
        names = [("first", 0), ("second", 1)]
        for name, index in names:
            await self._load(name, index)
        await self._client.post("/reset_prefix_cache")
        cached = [await self._cached(name) for name in (self._base, "first", "second", "first")]
        self._expect(cached[:3] == [0, 0, 0] and cached[3] > 0, f"prefixes found of each other: {cached}")
        late = [size for at, size in self.found.memory if at >= self.found.memory[-1][0] / 2]
        self._expect(late[-1] - late[0] < MOST_GROWTH, f"the engine grew from {late[0]:,} to {late[-1]:,} bytes")

    async def _cached(self, name: str) -> int:
        body = _body(name, 0) | {"prompt": PROMPTS[0] * 6}
        usage = (await self._client.post("/v1/completions", json=body)).json()["usage"]
        return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    def _expect(self, holds: bool, told: str) -> None:
        if not holds:
            self.found.wrong.append(told)


def _body(name: str, prompt: int, **more: Any) -> dict[str, Any]:
    return {
        "model": name,
        "prompt": PROMPTS[prompt],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }


async def soak(seconds: float, seed: int = 1) -> Found:
    """Runs it for so long on a server of its own."""
    with tempfile.TemporaryDirectory() as folder, serve(FLAGS) as child:
        places = write_adapters(Path(folder))
        async with httpx.AsyncClient(base_url=child.url, timeout=120, trust_env=False) as client:
            return await Soak(child, client, places, seed).run(seconds)
