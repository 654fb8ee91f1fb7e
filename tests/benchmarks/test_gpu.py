"""The benchmark of GPUs runs through, on the device that interprets kernels."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from benchmarks.gpu import run
from benchmarks.gpu.measure import Figure
from benchmarks.gpu.trace import Launch, by_kernel, idle_share

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted where there is a GPU"),
]


@pytest.mark.slow
def test_every_section_runs_through(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--device", "interpreter", "--tiny", "--out", str(tmp_path)]) == 0, capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["sections"]) == set(run.SECTIONS)
    assert not results["failures"] and not results["references"]
    figures = [figure for section in results["sections"].values() for figure in section]
    assert all(math.isfinite(figure["value"]) for figure in figures)
    for plot in tmp_path.glob("*.svg"):
        ElementTree.parse(plot)
    assert (tmp_path / "kernels.linear.svg").is_file()


def test_only_some_sections() -> None:
    assert run.chosen("kernels.head") == ["card", "kernels.head"]
    assert run.chosen("model.llama_8b", with_card=False) == ["model.llama_8b"]
    assert {"kernels.rows", "model.start"} & set(run.chosen("model")) == {"model.start"}
    with pytest.raises(SystemExit, match=r"kernels\.nothing"):
        run.chosen("kernels.nothing")


def test_targets() -> None:
    assert Figure("it", 5.0, "ms", 0.9, "bandwidth", least=0.85).met
    assert Figure("it", 5.0, "ms", 0.8, "bandwidth", least=0.85).met is False
    assert Figure("it", 5.0, "ms", most=4.0).met is False
    assert Figure("it", 5.0, "ms").met is None


def test_traces_are_summed() -> None:
    launches = [Launch("a", 0.0, 10.0), Launch("b", 11.0, 40.0), Launch("a", 30.0, 50.0), Launch("a", 90.0, 100.0)]
    assert idle_share(launches) == (0.4, 0.59)
    assert by_kernel(launches, 2) == [("a", 20.0, 1.5), ("b", 14.5, 0.5)]
