"""A few of the moments at which ranks are killed, stopped and slowed: streams end as undisturbed, nothing is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import rank_kills
from penstock.kernels.cpu import native

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built")


@pytest.mark.parametrize(
    ("degree", "kind"),
    [
        ("pp", "kill"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (
            ("tp", "kill"), ("tp", "lead"), ("pp", "lead"), ("tp", "stop"), ("pp", "stop"), ("tp", "slow"),
            ("pp", "slow"),
        )),
    ],
)  # fmt: skip
def test_streams_end_as_undisturbed(
    degree: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_kills, "LIMIT_S", 40.0)
    asked = ["--degrees", degree, "--kinds", kind, "--moments", "1", "--streams", "16", "--tokens", "200"]
    rank_kills.main([*asked, "--results", str(tmp_path)])
    found = json.loads((tmp_path / "rank_kills.json").read_text())["runs"][degree]
    assert found["kinds"][kind]["moments"] == 1 and found["kinds"][kind]["whole"] == 16, found
    assert not found["left"]
    assert f"-{degree} 2" in capsys.readouterr().out


def test_streams_are_counted_by_how_they_ended() -> None:
    found = rank_kills.Found(1)
    for text, ended in (
        ("abc", "whole"),
        ("ab", "cut"),
        ("ab", "whole"),
        ("ax", "whole"),
        ("ab", "the engine"),
        ("x", "it"),
    ):
        rank_kills.Disturbance._enter(found, text, ended, "abc")
    assert (found.whole, found.cut, found.other, found.errors) == (1, 2, 2, {"the engine": 1})
    both = found.add(rank_kills.Found(2, longest_s=3.0, errors={"the engine": 2}))
    assert (both.moments, both.longest_s, both.errors, both.wrong) == (3, 3.0, {"the engine": 3}, 4)
