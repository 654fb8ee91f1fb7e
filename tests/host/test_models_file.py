"""Lists of models: what they say, and what is said of those that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.host.models_file import models_in, read_models_file, seconds_of
from penstock.host.source import RemoteModel

LIST = """
models:
  small:
    model: penstock-concierge
    options: {max-model-len: 512, dtype: float32}
    aliases: [gpt-4o-mini]
    pinned: true
  large: {model: ~/large.gguf, ttl: 90s}
  there:
    remote: {url: "http://127.0.0.1:9/v1/", model: big, key_from: THERE_KEY, timeout: 2m, retries: 0}
  always: {model: folder, ttl: -1}
  short: folder/of/it
aliases:
  chat: {small: 3, large: 1}
  one: large
"""


def listed(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "models.yaml"
    path.write_text(text)
    return path


def test_a_list(tmp_path: Path) -> None:
    found = read_models_file(listed(tmp_path, LIST), EngineOptions(threads=1))
    assert list(found) == ["small", "large", "there", "always", "short"]
    small, large = found["small"], found["large"]
    assert small.options == EngineOptions(
        model="penstock-concierge", served_model_name="small", max_model_len=512, dtype="float32", threads=1
    )
    assert (small.pinned, small.ttl, small.aliases) == (True, None, (("gpt-4o-mini", 1.0), ("chat", 3.0)))
    assert (large.pinned, large.ttl, large.aliases) == (False, 90.0, (("chat", 1.0), ("one", 1.0)))
    assert found["always"].pinned
    assert found["short"].options is not None
    assert found["short"].options.model == "folder/of/it"
    assert found["there"].options is None
    assert found["there"].remote == RemoteModel("http://127.0.0.1:9/v1", "big", "THERE_KEY", timeout=120.0, retries=0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "allowed: names with what they mean"),
        ("models: {}", "lists no models"),
        ("models: [a]", "models is"),
        ("model: {a: b}", r'has "model"; allowed: models, aliases'),
        ("models: {a: {}}", "models.a: say either model"),
        ("models: {a: {model: x, remote: {url: y}}}", "models.a: say either model"),
        ("models: {a: {model: x, pined: true}}", r'models.a has "pined"; allowed: model, remote'),
        ("models: {a: {model: x, pinned: 1}}", "pinned is 1; allowed: true, false"),
        ("models: {a: {model: x, ttl: soon}}", r'ttl is "soon"; allowed: seconds'),
        ("models: {a: {model: x, aliases: b}}", r'aliases is "b"; allowed: a list'),
        ("models: {a: {model: x, options: {dtpe: float32}}}", r'options has "dtpe"; allowed: device, dtype'),
        ("models: {a: {model: x, options: {dtype: float64}}}", "models.a.options: --dtype is 'float64'"),
        ("models: {a: {model: x, options: {memory: 1}}}", r'options has "memory"'),
        ("models: {a: {remote: {url: ftp://x, model: y}}}", "remote.url is"),
        ("models: {a: {remote: {url: http://x/v1}}}", "remote.model is missing"),
        ("models: {a: {remote: {url: http://x/v1, model: y, retries: -1}}}", "retries is -1"),
        ("models: {a: {remote: {url: http://x/v1, model: y, timeout: 0}}}", "timeout is 0; allowed: more than 0"),
        ("models: {a: {model: x}}\naliases: {b: {c: 1}}", r'aliases.b names "c", which is no model'),
        ("models: {a: {model: x}}\naliases: {b: {a: 0}}", "aliases.b.a is 0; allowed: a weight above 0"),
        ("models: {a: {model: x}}\naliases: {b: {}}", "aliases.b names no model"),
        ("models: {1: {model: x}}", "allowed: names"),
        ("models: {a: {model: 3}}", "models.a.model is 3"),
        ("models: {a: [", "is no YAML"),
        ("a: &a [*a]\nmodels: !!python/object/apply:os.system [ls]", "is no YAML"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_models_file(listed(tmp_path, text), EngineOptions())


def test_a_list_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_models_file(tmp_path / "none.yaml", EngineOptions())


def test_a_folder_of_models(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    (tmp_path / "quantised").mkdir()
    (tmp_path / "quantised" / "a-q4.gguf").write_bytes(b"")
    for name in ("alone.gguf", "split-00001-of-00002.gguf", "split-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "empty").mkdir()
    found = models_in(tmp_path, EngineOptions(threads=1))
    assert set(found) == {"hf", "quantised", "alone", "split"}
    assert found["split"].options == EngineOptions(
        model=str(tmp_path / "split-00001-of-00002.gguf"), served_model_name="split", threads=1
    )
    with pytest.raises(ConfigError, match="cannot be listed"):
        models_in(tmp_path / "none", EngineOptions())


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(90, 90.0), ("90", 90.0), ("1.5m", 90.0), ("2h", 7200.0), ("500ms", 0.5), (0, 0.0), (-1, None), ("-1", None)],
)
def test_durations(given: object, seconds: float | None) -> None:
    assert seconds_of(given, "x") == seconds


@pytest.mark.parametrize("given", ["", "5 minutes", "m", None, True, float("nan"), [1]])
def test_what_is_no_duration(given: object) -> None:
    with pytest.raises(ConfigError, match="x is"):
        seconds_of(given, "x")
