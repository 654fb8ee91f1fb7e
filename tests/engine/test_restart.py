"""An engine goes on from what an earlier start kept: without torch, with the same bits, or else anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config import code
from penstock.config.options import EngineOptions
from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.config.sampling import SamplingParams
from penstock.core.request import EngineRequest
from penstock.engine import build
from penstock.engine.build import build_engine
from penstock.engine.loop import Engine
from penstock.kernels.cpu import native
from penstock.runtime.replay import ReplayExecutor
from penstock.startup.first_start import FirstStart
from penstock.startup.kept_start import find
from penstock.weights.open import bundled_model_path
from tests.models import tiny

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")
Answers = dict[str, tuple[list[Any], list[Any], list[bytes]]]
PROMPTS = (tiny.prompt(37, 1), tiny.prompt(5, 2), tiny.prompt(26, 3))
SAMPLED = SamplingParams(max_tokens=6, temperature=0.8, seed=7, logprobs=3, prompt_logprobs=2, ignore_eos=True)
# A process of its own: two starts of the same model, of which the second must not load torch.
STARTS = """
import json, sys
from penstock.config.options import EngineOptions
from penstock.core.request import EngineRequest
from penstock.config.sampling import SamplingParams
from penstock.engine.build import build_engine
engine, info = build_engine(EngineOptions(**json.loads(sys.argv[1])))
sampling = SamplingParams(max_tokens=8, temperature=0.7, seed=3, logprobs=2, ignore_eos=True)
engine.add(EngineRequest("a", tuple(range(5, 45)), sampling))
said = []
while engine.has_work:
    said += [[list(output.tokens), [repr(entry) for entry in output.logprobs]] for output in engine.step()]
engine.close()
print(json.dumps([said, "torch" in sys.modules, [row.reason for row in info.settings if row.name == "step"]]))
"""


def options(model: Path, cache: Path, **others: Any) -> EngineOptions:
    given: dict[str, Any] = {"threads": 2, "max_num_seqs": 4, "kv_blocks": 40, "max_num_batched_tokens": 64, **others}
    return EngineOptions(model=str(model), device="cpu", pack_cache=str(cache), **given)


def requests(pooling: PoolingParams | None = None) -> Iterator[EngineRequest]:
    for number, prompt in enumerate(PROMPTS):
        yield EngineRequest(f"r{number}", tuple(prompt), SAMPLED, pooling=pooling)


def answers(engine: Engine, asked: Sequence[EngineRequest]) -> Answers:
    """All that is said of each request, in order; not when, nor in how many steps."""
    for request in asked:
        engine.add(request)
    said: Answers = {request.request_id: ([], [], []) for request in asked}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            generated, prompt, pooled = said[output.request_id]
            generated += zip(output.tokens, output.logprobs)  # noqa: B905  # a request that pools has no entries
            prompt += output.prompt_logprobs
            pooled += [output.pooled] if output.pooled else []
    assert all(generated or pooled for generated, _, pooled in said.values())
    return said


def start(given: EngineOptions, asked: Sequence[EngineRequest]) -> tuple[Answers, bool]:
    """The answers, and whether the engine went on from what was kept."""
    engine, _ = build_engine(given)
    try:
        return answers(engine, asked), isinstance(vars(engine.runner)["_executor"], ReplayExecutor)
    finally:
        engine.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    tiny.save("qwen3", place)
    return place


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_starts_again_with_the_same_bits(family: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    tiny.save(family, model)
    given = options(model, tmp_path / "cache")
    first, again = start(given, list(requests()))
    assert not again
    second, again = start(given, list(requests()))
    assert again
    assert second == first
    unkept, _ = start(replace(given, pack_cache="off"), list(requests()))
    assert first == unkept


def test_a_second_start_does_not_load_torch(tmp_path: Path) -> None:
    given = {"model": str(bundled_model_path()), "threads": 2, "pack_cache": str(tmp_path), "kv_blocks": 64}
    command = [sys.executable, "-c", STARTS, json.dumps(given)]
    root = Path(__file__).resolve().parents[2]
    runs = [
        json.loads(subprocess.run(command, cwd=root, check=True, capture_output=True, timeout=120).stdout)
        for _ in range(2)
    ]
    assert [loaded for _, loaded, _ in runs] == [True, False]
    assert runs[1][0] == runs[0][0]
    assert "as an earlier start recorded them" in runs[1][2][0]


LATE = """
import json, os, sys
from penstock.config.options import EngineOptions
from penstock.config.pooling import PoolingKind, PoolingParams
from penstock.core.request import EngineRequest
from penstock.config.sampling import SamplingParams
from penstock.engine.build import build_engine
engine, _ = build_engine(EngineOptions(**json.loads(sys.argv[1])))
without = "torch" not in sys.modules
sampling = SamplingParams(max_tokens=1)
engine.add(EngineRequest("a", (5, 6, 7), sampling, pooling=PoolingParams(PoolingKind.MEAN)))
while engine.has_work:
    engine.step()
import torch
print(json.dumps([without, torch.get_num_threads(), sorted(name for name in os.environ if name.startswith("OMP_NUM"))]))
engine.close()
"""


def test_torch_that_is_loaded_late_gets_the_engines_threads_and_nobody_else_does(folder: Path, tmp_path: Path) -> None:
    given = {"model": str(folder), "threads": 1, "pack_cache": str(tmp_path / "cache"), "kv_blocks": 64}
    root = Path(__file__).resolve().parents[2]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_NUM")}
    command = [sys.executable, "-c", LATE, json.dumps(given)]
    runs = [
        json.loads(subprocess.run(command, cwd=root, env=environment, check=True, capture_output=True).stdout)
        for _ in range(2)
    ]
    assert runs == [[False, 1, []], [True, 1, []]]


def test_a_second_start_tells_the_log_what_a_first_one_does(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock")
    logged = []
    for _ in range(2):
        start(options(folder, tmp_path / "cache"), list(requests())[:1])
        logged.append([record.getMessage() for record in caplog.records if "kept of this start" not in record.message])
        caplog.clear()
    first, second = ([line.split()[0] for line in lines] for lines in logged)
    assert {"weights", "step"} < set(first)
    assert set(first) == set(second)
    assert [line for line in logged[0] if "MiB" in line and "step" not in line and "packed" not in line] == [
        line for line in logged[1] if "MiB" in line and "step" not in line and "packed" not in line
    ]


def test_what_needs_torch_is_served_all_the_same(folder: Path, tmp_path: Path) -> None:
    given = options(folder, tmp_path / "cache")
    pooled = list(requests(PoolingParams(PoolingKind.MEAN)))
    first, _ = start(given, pooled)
    second, again = start(given, pooled)
    assert again
    assert second == first


@pytest.mark.parametrize(
    "other", [{"arithmetic": "fast"}, {"block_size": 32}, {"kv_cache_dtype": "float16"}, {"max_model_len": 64}]
)
def test_other_options_start_anew(other: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    given = options(folder, tmp_path / "cache")
    start(given, [])
    assert find(given) is not None
    changed = replace(given, **other)
    assert find(changed) is None
    truth, _ = start(replace(changed, pack_cache="off"), list(requests()))
    anew, again = start(changed, list(requests()))
    assert not again
    assert anew == truth
    later, again = start(changed, list(requests()))  # and keep that
    assert again
    assert later == truth


def test_sizes_of_steps_and_caches_are_free(folder: Path, tmp_path: Path) -> None:
    given = options(folder, tmp_path / "cache")
    truth, _ = start(given, list(requests()))
    found, again = start(
        replace(given, max_num_seqs=2, kv_blocks=30, max_num_batched_tokens=16, threads=1), list(requests())
    )
    assert again
    assert found == truth


def test_changed_code_starts_anew(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = options(folder, tmp_path / "cache")
    start(given, [])
    assert find(given) is not None
    monkeypatch.setattr(code, "code_state", lambda: (("changed.py", 1, 2),))
    assert find(given) is None


def test_a_changed_checkpoint_starts_anew(folder: Path, tmp_path: Path) -> None:
    given = options(folder, tmp_path / "cache")
    start(given, [])
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    assert find(given) is None


def test_a_checkpoint_that_changes_while_it_is_read_starts_anew(folder: Path, tmp_path: Path) -> None:
    given = options(folder, tmp_path / "cache")
    first = FirstStart(given)
    config = folder / "config.json"
    config.write_text(config.read_text() + "\n")
    first.load()
    assert list((tmp_path / "cache").glob("*.start"))
    assert find(given) is None


def test_a_cache_folder_that_cannot_be_looked_at_is_done_without(folder: Path, tmp_path: Path) -> None:
    truth, _ = start(options(folder, tmp_path / "cache"), list(requests()))
    found, again = start(options(folder, tmp_path / ("x" * 300)), list(requests()))
    assert not again
    assert found == truth


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "weights gone"])
def test_a_damaged_file_starts_anew(damage: str, folder: Path, tmp_path: Path) -> None:
    given = options(folder, tmp_path / "cache")
    truth, _ = start(given, list(requests()))
    (file,) = (tmp_path / "cache").glob("*.start")
    data = bytearray(file.read_bytes())
    if damage == "weights gone":
        next((tmp_path / "cache").glob("*.packed")).unlink()
    elif damage == "flipped":
        data[5000] ^= 1  # in the first part's data
        file.write_bytes(data)
    else:
        file.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    assert find(given) is None
    found, again = start(given, list(requests()))
    assert not again
    assert found == truth
    assert find(given) is not None


def test_a_journal_that_does_not_fit_starts_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = options(folder, tmp_path / "cache")
    truth, _ = start(given, list(requests()))
    kept = find(given)
    assert kept is not None
    wrong = replace(kept, kept=replace(kept.kept, body=[["no_such_op", [], None], *kept.kept.body]))
    monkeypatch.setattr(build, "find", lambda asked: wrong)
    found, again = start(given, list(requests()))
    assert not again
    assert found == truth
    assert "starts anew" in caplog.text
