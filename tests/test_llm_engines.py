"""Several engines of a model under `LLM`: the answers of one, to the bit."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM
from penstock.cluster.client import ClusterClient
from penstock.completions import Completion
from penstock.config.errors import ConfigError, EngineDeadError
from penstock.host.process_client import ProcessClient
from penstock.kernels.cpu import native
from penstock.search.beam import BeamParams
from tests.models import encoders
from tests.server.test_embeddings import words

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
CHATS = [[{"role": "user", "content": f"Book a table for {count} at seven in Berkeley."}] for count in range(2, 8)]
OPTIONS: dict[str, Any] = {"kv_blocks": 256, "max_num_seqs": 8, "max_model_len": 512, "threads": 2}


def told(answers: list[Completion]) -> list[Any]:
    outputs = [output for answer in answers for output in answer.outputs]
    return [(output.token_ids, [entry.logprob for entry in output.logprobs or ()]) for output in outputs]


def cluster_of(llm: LLM) -> ClusterClient:
    client = llm._async._client
    assert isinstance(client, ClusterClient)
    return client


def asked(llm: LLM, caps: Path) -> list[Any]:
    """Answers of all kinds."""
    return [
        told(llm.chat(CHATS, temperature=0, max_tokens=24, logprobs=3)),
        told(llm.chat(CHATS, temperature=0.8, seed=4, max_tokens=24, n=3, logprobs=1)),
        told(llm.generate(["Once upon a time", "The weather"], temperature=1, max_tokens=24, prompt_logprobs=1)),
        told(llm.chat(CHATS[0], temperature=0, max_tokens=24, choice=["yes", "no, never"])),
        told(llm.chat(CHATS[:2], temperature=0, max_tokens=24, adapter=caps)),
        told(llm.beam_search("The weather in", BeamParams(width=3, n=3, max_tokens=6))),
    ]


def test_answers_are_those_of_one_engine(shared_data: Path) -> None:
    caps, found = shared_data / "models" / "penstock-concierge-lora-caps", []
    for engines in (1, 3):
        with LLM(enable_lora=True, data_parallel_size=engines, **OPTIONS) as llm:
            found.append(asked(llm, caps))
            stats = llm.stats()
    assert found[0] == found[1]
    assert len(stats.engines) == 3 and min(one.generated_tokens for one in stats.engines) > 0


@pytest.mark.parametrize("policy", ["round-robin", "power-of-two"])
def test_any_policy_gives_the_same(policy: str, shared_data: Path) -> None:
    caps, found = shared_data / "models" / "penstock-concierge-lora-caps", []
    for options in ({}, {"data_parallel_size": 2, "routing_policy": policy}):
        with LLM(enable_lora=True, **OPTIONS, **options) as llm:  # type: ignore[arg-type]
            found.append(asked(llm, caps))
    assert found[0] == found[1]


def test_an_engine_is_killed_in_mid_answer() -> None:
    how: dict[str, Any] = {"temperature": 1.0, "max_tokens": 300, "ignore_eos": True, "logprobs": 1, "seed": 9}
    with LLM(**OPTIONS) as llm:
        expected = told(llm.chat(CHATS, **how))
    with LLM(data_parallel_size=2, **OPTIONS) as llm:
        client = cluster_of(llm)
        killed: list[int] = []

        def kill() -> None:
            while not killed:
                streams = [stream for engine in client.engines for stream in engine.line.streams.live()]
                if len(streams) == len(CHATS) and all(stream.tokens > 30 for stream in streams):
                    victim = client.engines[0]
                    assert isinstance(victim, ProcessClient)
                    killed.append(len(victim.line.streams))
                    os.kill(victim.pid, signal.SIGKILL)
                time.sleep(0.001)

        killer = threading.Thread(target=kill)
        killer.start()
        answers = told(llm.chat(CHATS, **how))
        killer.join(60)
        assert answers == expected
        assert llm.stats().resumed == killed[0] > 0
        assert all(len(engine.line.streams) == 0 for engine in client.engines)


def test_each_engine_may_have_ranks() -> None:
    how: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "logprobs": 1}
    found = []
    for sizes in ({}, {"data_parallel_size": 2, "tensor_parallel_size": 2}):
        with LLM(**OPTIONS, **sizes) as llm:
            found.append(told(llm.chat(CHATS[:4], **how)))
    assert found[0] == found[1]


def test_models_that_embed(tmp_path: Path) -> None:
    words(template=True).save(str(tmp_path / "tokenizer.json"))
    encoders.save("bert", tmp_path)
    texts, found = ["one two three", "two", "seven six five four three two one " * 5], []
    for engines in (1, 2):
        with LLM(tmp_path, kv_blocks=64, threads=1, data_parallel_size=engines) as llm:
            found.append([list(result.values) for result in llm.embed(texts * 4)])
    assert found[0] == found[1]


def test_a_closed_one_says_so_and_leaves_no_process() -> None:
    llm = LLM(data_parallel_size=2, **OPTIONS)
    pids = [engine.pid for engine in cluster_of(llm).engines if isinstance(engine, ProcessClient)]
    llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate("one")
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_what_cannot_be_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="belongs to one engine"):
        LLM(data_parallel_size=2, kv_disk=2**30)
