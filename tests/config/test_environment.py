"""Environment variables are read once, checked, and refused by name."""

from __future__ import annotations

import pytest

from penstock.config.environment import Environment, read_environment
from penstock.config.errors import ConfigError


def test_an_empty_environment_gives_the_defaults() -> None:
    assert read_environment({}) == Environment()
    assert read_environment({"PENSTOCK_ISA": "", "PENSTOCK_THREADS": " ", "PENSTOCK_API_KEY": " , "}) == Environment()


def test_every_variable_is_read() -> None:
    found = read_environment(
        {
            "PENSTOCK_API_KEY": "first-key-1, second-key-2",
            "PENSTOCK_ISA": "AVX2",
            "PENSTOCK_THREADS": "8",
            "PENSTOCK_LOG_LEVEL": "Debug",
            "PENSTOCK_LOG_FORMAT": "JSON",
            "PENSTOCK_MODEL": "some/folder",
        }
    )
    assert found == Environment(("first-key-1", "second-key-2"), "avx2", 8, "debug", "json", "some/folder")


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_THREADS", "3")
    assert read_environment().threads == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PENSTOCK_ISA", "sse9"),
        ("PENSTOCK_LOG_FORMAT", "xml"),
        ("PENSTOCK_THREADS", "0"),
        ("PENSTOCK_THREADS", "-1"),
        ("PENSTOCK_THREADS", "1e3"),
        ("PENSTOCK_THREADS", "1025"),
        ("PENSTOCK_THREADS", "٣"),
        ("PENSTOCK_THREADS", "9" * 5000),
        ("PENSTOCK_LOG_LEVEL", "loud"),
        ("PENSTOCK_MODEL", "a\nb"),
        ("PENSTOCK_API_KEY", "long-enough-key,has a space in it"),
        ("PENSTOCK_API_KEY", "schlüssel-key"),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        read_environment({name: value})
    assert len(str(caught.value)) < 300


def test_a_refused_key_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment({"PENSTOCK_API_KEY": "s3cret words"})
    assert "s3cret" not in str(caught.value)
