"""The library's models in a host."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config.environment import ModelPlaces
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.host.engine import hosted_options
from penstock.host.library_models import library_models
from penstock.library.make import add_path
from penstock.library.names import RegistryName
from penstock.library.store import Store
from penstock.weights.open import bundled_model_path

MINE = RegistryName("mine", "small")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(ModelPlaces(tmp_path / "store", tmp_path / "hub", endpoint="http://127.0.0.1:9"))


def test_every_model_of_the_library_is_served(store: Store) -> None:
    add_path(store, bundled_model_path(), MINE)
    found = library_models(store, EngineOptions(threads=1))
    assert set(found) == {"mine:small", "penstock-concierge"}
    options = found["mine:small"].options
    assert options is not None
    assert (options.served_model_name, options.threads) == ("mine:small", 1)
    assert (Path(options.model) / "config.json").is_file()


def test_a_model_that_is_damaged_is_left_out(store: Store) -> None:
    add_path(store, bundled_model_path(), MINE)
    for blob in (store.places.store / "blobs").iterdir():
        blob.unlink()
    assert set(library_models(store, EngineOptions())) == {"penstock-concierge"}


@pytest.mark.parametrize("odd", [OSError("odd"), UnicodeEncodeError("utf-8", "x", 0, 1, "odd")])
def test_an_odd_model_leaves_the_others(store: Store, monkeypatch: pytest.MonkeyPatch, odd: Exception) -> None:
    """Whatever cannot be laid out: a name too long for the disk, text that no file can hold."""
    add_path(store, bundled_model_path(), MINE)

    def refuse(*_: object, **__: object) -> None:
        raise odd

    monkeypatch.setattr("penstock.library.store.view", refuse)
    assert set(library_models(store, EngineOptions())) == {"penstock-concierge"}


def test_a_name_on_a_list_is_looked_up_when_it_is_loaded() -> None:
    with pytest.raises(ConfigError, match="there is no model"):
        hosted_options(EngineOptions(model="nobody/has-this"))
