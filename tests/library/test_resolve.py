"""Names of models in options, wherever options come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock import LLM
from penstock.async_llm import engine_options
from penstock.config.errors import ConfigError
from penstock.config.options import EngineOptions
from penstock.host.engine import hosted_options
from penstock.library.make import add_path
from penstock.library.names import RegistryName
from penstock.library.resolve import with_draft_path
from penstock.library.store import open_store
from penstock.weights.open import bundled_model_path
from tests.cli.test_options import parsed


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the library has the model `drafts:v1`."""
    for name in ("PENSTOCK_MODELS", "HF_HOME", "OLLAMA_MODELS", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    store = open_store()
    add_path(store, bundled_model_path(), RegistryName("drafts", "v1"))
    entry = store.find("drafts:v1")
    assert entry is not None
    return str(entry.path)


def drafting(model: str) -> str:
    return json.dumps({"model": model, "num_speculative_tokens": 3})


def test_a_draft_model_is_named_as_a_model_is(place: str) -> None:
    found = json.loads(with_draft_path(drafting("drafts:v1")) or "")
    assert found == {"model": place, "num_speculative_tokens": 3}
    given = drafting("drafts:v1")
    made = [
        engine_options("penstock-concierge", {"speculative_config": given}),
        hosted_options(EngineOptions(speculative_config=given)),
        parsed("--speculative-config", given)[0],
    ]
    for options in made:
        assert json.loads(options.speculative_config or "")["model"] == place
    for config in (None, '{"method": "suffix"}', '{"model": "[ngram]"}'):
        assert with_draft_path(config) == config
    for path in (place, "penstock-concierge"):
        assert json.loads(with_draft_path(drafting(path)) or "")["model"] == path


def test_a_draft_model_that_is_not_here_is_refused_before_the_engine_starts(place: str) -> None:
    with pytest.raises(ConfigError, match=r"--speculative-config: there is no model .* Nearest here: drafts:v1"):
        hosted_options(EngineOptions(speculative_config=drafting("draft:v1")))
    with pytest.raises(ConfigError, match="--speculative-config: there is no model at"):
        with_draft_path(drafting("./none"))
    with pytest.raises(ConfigError, match="--speculative-config is"):
        engine_options("penstock-concierge", {"speculative_config": "{"})


def test_a_named_draft_model_drafts(place: str) -> None:
    with LLM(speculative_config=drafting("drafts:v1"), threads=1, max_model_len=256) as llm:
        llm.generate("The hotel", max_tokens=24, temperature=0.0)
        stats = llm.stats()
    assert stats.drafted_tokens == stats.accepted_tokens > 0  # the model itself
