"""Memory of a real GPU: bytes arrive, and an engine stays within its share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.config.options import EngineOptions
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine.build import build_engine
from penstock.kernels.devices import memory_meter
from penstock.kernels.staging import CHUNK, to_device

SHARE = 0.1


@pytest.fixture(autouse=True)
def _on_a_card(device: str) -> None:
    if device != "cuda":
        pytest.skip("the interpreter has no memory of its own")


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, 3 * CHUNK + 5])
def test_bytes_arrive(length: int) -> None:
    array = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    array.setflags(write=False)
    assert np.array_equal(to_device(array, "cuda").cpu().numpy(), array)


def test_an_engine_stays_within_its_share() -> None:
    engine, info = build_engine(EngineOptions(device="cuda", gpu_memory_utilization=SHARE))
    named = {row.name: row for row in info.memory}
    assert named["activations"].reason == "largest step, measured"
    settings = {row.name: row.reason for row in info.settings}
    assert "are not torch's" in settings["largest step"]
    meter = memory_meter("cuda")
    assert meter is not None
    torch.cuda.reset_peak_memory_stats()
    for number in range(info.max_num_seqs):
        prompt = tuple(1 + (number * 7 + place) % 50 for place in range(100))
        engine.add(EngineRequest(str(number), prompt, SamplingParams(max_tokens=8, top_p=0.9), seed=number))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
    use = meter.read()
    assert use.peak <= SHARE * use.total - use.others
    engine.close()
