"""`penstock tune`: the search, and a search over real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.cli.tune import Tuning


class Engine:
    """Does more or less as its settings are; `noise` is what each measurement is multiplied by, in turn."""

    def __init__(self, speeds: Mapping[str, Mapping[int, float]], noise: Iterator[float] | None = None) -> None:
        self.speeds, self.noise, self.asked = speeds, noise, 0

    async def measure(self, settings: Mapping[str, int]) -> float:
        self.asked += 1
        found = 1.0 if self.noise is None else next(self.noise)
        for name, value in settings.items():
            found *= self.speeds[name].get(value, 1.0)
        return found


def tuned(engine: Engine, tuning: Tuning) -> dict[str, int]:
    asyncio.run(tuning.run(engine.measure))
    return tuning.best


def test_what_is_better_is_taken_and_what_follows_is_compared_with_it() -> None:
    engine = Engine({"threads": {1: 1.2}, "tokens": {128: 0.8, 512: 1.1, 1024: 1.12}})
    tuning = Tuning({"threads": 2, "tokens": 256}, {"threads": [1], "tokens": [128, 256, 512, 1024]})
    assert tuned(engine, tuning) == {"threads": 1, "tokens": 512}  # 1,024 is not better than 512 by enough
    assert [(name, value, taken) for name, value, _, taken in tuning.found] == [
        ("threads", 1, True),
        ("tokens", 128, False),
        ("tokens", 512, True),
        ("tokens", 1024, False),
    ]
    assert engine.asked == 2 * (3 + 1 + 3 + 3)  # one that loses is not measured again


def test_noise_alone_takes_nothing() -> None:
    noise = iter([1.0, 1.5, 1.5, 1.0, 1.0, 0.9])  # two pairs are won by far, the third is lost
    tuning = Tuning({"threads": 2}, {"threads": [1]})
    assert tuned(Engine({"threads": {}}, noise), tuning) == {"threads": 2}
    assert tuning.found[0][2] == pytest.approx(1.5)


def test_nothing_is_begun_after_the_deadline() -> None:
    engine = Engine({"threads": {1: 2.0}})
    assert tuned(engine, Tuning({"threads": 2}, {"threads": [1]}, deadline=0.0)) == {"threads": 2}
    assert engine.asked == 0


def tune(*arguments: str) -> tuple[int, str]:
    small = ("--input-len", "8", "--output-len", "2", "--num-prompts", "2", "--repeat", "1")
    result = CliRunner().invoke(app, ["tune", *small, *arguments], catch_exceptions=False)
    return result.exit_code, result.output


def test_real_engines_are_measured_and_the_file_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "tuned.yaml"
    status, said = tune("--threads", "2", "--goal", "latency", "--emit-config", str(path), "--kv-blocks", "64")
    assert status == 0, said
    found = yaml.safe_load(path.read_text())
    assert set(found) == {"threads", "max-num-batched-tokens"} and found["threads"] in (1, 2)
    assert "penstock-concierge on " in path.read_text() and "goal latency" in path.read_text()
    assert all(text in said for text in ("threads", "max_num_batched_tokens", "ratio"))
    shown = CliRunner().invoke(app, ["config", "show", "serve", "--config", str(path)], catch_exceptions=False)
    assert shown.exit_code == 0 and path.name in "".join(shown.output.split())


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--emit-config", "/nowhere/x.yaml"), "there is no folder /nowhere"),
        (("--max-model-len", "4"), "a request failed, so nothing can be compared"),
    ],
)
def test_what_cannot_be_measured_is_said(arguments: tuple[str, ...], told: str) -> None:
    status, said = tune(*arguments)
    assert status == 1 and told in said
