"""Every family of models on the GPU: its weights are placed there as they are stored, and it says what the CPU says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_engines import engine_of
from tests.gpu.test_features import asked, run, tiny

INTERPRETED = ("mamba2",)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_tokens_are_the_cpus(device: str, family: str, tmp_path: Path) -> None:
    if device != "cuda" and family not in INTERPRETED:
        pytest.skip("in the interpreter one of these is enough")
    tiny.save(family, tmp_path)
    found = []
    for where in ("cpu", device):
        engine = engine_of(tmp_path, where, enforce_eager=True, kv_blocks=24, max_model_len=96, max_num_seqs=2)
        found.append([answer.tokens for answer in run(engine, asked(2, 4)).values()])
        engine.close()
    assert found[0] == found[1]
