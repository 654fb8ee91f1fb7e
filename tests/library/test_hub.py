"""Pulls from Hugging Face, against a stand-in for its API; huggingface_hub's own client shares the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config.environment import ModelPlaces
from penstock.config.errors import CheckpointError, ConfigError, PenstockError
from penstock.host.adapters import AdapterNames
from penstock.library.adapters import adapter_path
from penstock.library.hub_cache import ADAPTER_FILES, quantisation, selected
from penstock.library.outlook import Outlook
from penstock.library.pull import pull
from penstock.library.store import Store
from penstock.library.web import open_web
from penstock.library.wish import Wish
from penstock.weights.adapters.open import adapter_digest
from penstock.weights.open import open_checkpoint
from tests.library.servers import Hub


@pytest.fixture
def store(places: ModelPlaces, hub: Hub) -> Store:
    return Store(replace(places, endpoint=hub.url))


def refuse_all(outlook: Outlook) -> str:
    return f"{outlook.name} cannot run here."


def test_only_what_is_needed_comes(store: Store, hub: Hub, concierge: dict[str, bytes]) -> None:
    others = {"pytorch_model.bin": b"1", "onnx/model.onnx": b"2", "consolidated.safetensors": b"3", "x.gguf": b"4"}
    others |= {"original/params.json": b"{}", "training_args.bin": b"5"}
    hub.put("me/concierge", {**concierge, **others})
    assert pull(store, "me/concierge", Wish()) == "me/concierge"
    entry = store.find("me/concierge")
    assert entry is not None
    assert {path.name for path in entry.path.iterdir()} == concierge.keys()
    assert {path.name: path.read_bytes() for path in entry.path.iterdir()} == concierge
    assert open_checkpoint(entry.path).config["architectures"] == ["Qwen3ForCausalLM"]
    assert sum(hub.sent.values()) == sum(map(len, concierge.values())) == entry.bytes


def test_the_cache_is_shared_with_huggingface_hub(store: Store, hub: Hub, concierge: dict[str, bytes]) -> None:
    """Its own client finds all files, loads none of them again, and has nothing to say against the cache."""
    hub.put("me/concierge", concierge)
    pull(store, "me/concierge@v1", Wish())
    pull(store, "me/concierge", Wish())
    before = sum(hub.sent.values())
    assert before == sum(map(len, concierge.values()))
    code = f"""
from huggingface_hub import scan_cache_dir, snapshot_download
cache = {str(store.places.hub)!r}
print(snapshot_download("me/concierge", cache_dir=cache, endpoint={hub.url!r}))
info = scan_cache_dir(cache)
assert not info.warnings, info.warnings
assert [sorted(repo.refs) for repo in info.repos] == [["main", "v1"]]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean())
    assert done.returncode == 0, done.stderr
    entry = store.find("me/concierge")
    assert entry is not None and done.stdout.strip() == str(entry.path)
    assert sum(hub.sent.values()) == before


def test_what_huggingface_hub_loaded_is_found_and_not_loaded_again(
    store: Store, hub: Hub, concierge: dict[str, bytes]
) -> None:
    hub.put("me/concierge", concierge)
    code = f"""
from huggingface_hub import snapshot_download
snapshot_download("me/concierge", cache_dir={str(store.places.hub)!r}, endpoint={hub.url!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean())
    assert done.returncode == 0, done.stderr
    assert [entry.name for entry in store.list()] == ["me/concierge", "penstock-concierge"]
    before = sum(hub.sent.values())
    pull(store, "me/concierge", Wish())
    assert sum(hub.sent.values()) == before


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PENSTOCK_"))}


def test_a_quantisation_is_pulled_by_its_name(store: Store, hub: Hub, quantised: Path) -> None:
    data = quantised.read_bytes()
    hub.put(
        "me/c-GGUF", {"c-Q8_0.gguf": data, "c-Q4_K_M.gguf": b"4" * 50, "mmproj-c-f16.gguf": b"5", "README.md": b"#"}
    )
    assert pull(store, "hf.co/me/c-GGUF:q8_0", Wish()) == "hf.co/me/c-GGUF:Q8_0"
    entry = store.find("me/c-GGUF:Q8_0")
    assert entry is not None and entry.path.name == "c-Q8_0.gguf"
    assert entry.path.read_bytes() == data
    assert dict(hub.sent) == {"/me/c-GGUF/c-Q8_0.gguf": len(data)}
    assert store.find("me/c-GGUF") is not None  # the only one that is here
    assert store.find("me/c-GGUF:Q4_K_M") is None


def test_shards_come_together(store: Store, hub: Hub) -> None:
    names = [f"UD/c-Q4_K_XL-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    hub.put("me/c", {name: name.encode() for name in names})
    pull(store, "me/c:Q4_K_XL", Wish())
    entry = store.find("me/c:Q4_K_XL")
    assert entry is not None and entry.path.name == "c-Q4_K_XL-00001-of-00003.gguf"
    assert sorted(path.name for path in entry.path.parent.iterdir()) == [name[3:] for name in names]


def test_an_unknown_quantisation_is_told_with_those_there_are(store: Store, hub: Hub) -> None:
    hub.put("me/c", {"c-Q8_0.gguf": b"8", "c.IQ2_XS.gguf": b"2"})
    with pytest.raises(ConfigError, match=r"IQ2_XS, Q8_0.*there is no such file"):
        pull(store, "me/c:Q5_K_M", Wish())
    assert pull(store, "me/c", Wish()) == "hf.co/me/c:Q8_0"


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("Llama-3.2-1B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("model.IQ3_XXS.gguf", "IQ3_XXS"),
        ("UD-Q2_K_XL/m-UD-Q2_K_XL-00001-of-00002.gguf", "UD-Q2_K_XL"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("m-BF16.gguf", "BF16"),
        ("Q8-model.gguf", "Q8"),
        ("model.gguf", ""),
    ],
)
def test_quantisations_are_read_from_names(file: str, quant: str) -> None:
    assert quantisation(file) == quant
    assert selected([file], quant) == [[file]]


def test_the_index_says_which_weights_are_the_models(store: Store, hub: Hub) -> None:
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    files = {"config.json": b"{}", "model.safetensors.index.json": index}
    weights = {"model-1.safetensors": b"1", "model-2.safetensors": b"2", "consolidated.safetensors": b"3"}
    hub.put("me/c", {**files, **weights})
    pull(store, "me/c", Wish())
    assert "/me/c/consolidated.safetensors" not in hub.sent and hub.sent["/me/c/model-2.safetensors"] == 1
    hub.put("me/d", {**files, "model-1.safetensors": b"1"})
    with pytest.raises(CheckpointError, match="lacks model-2"):
        pull(store, "me/d", Wish())


@pytest.mark.parametrize("name", ["../../evil.json", "/etc/evil.json", "a\\..\\evil.json", "..json/../x.json"])
def test_names_that_lead_elsewhere_are_refused(store: Store, hub: Hub, tmp_path: Path, name: str) -> None:
    hub.put("me/c", {"config.json": b"{}", "model.safetensors": b"w", name: b"evil"})
    with suppress(CheckpointError):  # or it is not loaded at all, as nothing that is needed
        pull(store, "me/c", Wish())
    assert not list(tmp_path.rglob("*evil*")) and "/me/c/" + name not in hub.sent
    assert not Path("/etc/evil.json").exists()


def test_odd_commits_and_digests_are_not_taken(store: Store, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.put("me/c", {"config.json": b"{}", "model.safetensors": b"w"})
    monkeypatch.setattr(hub, "sibling", lambda name, data: {"rfilename": name, "size": len(data), "blobId": "../../x"})
    with pytest.raises(ConfigError, match="no model in safetensors"):
        pull(store, "me/c", Wish())
    monkeypatch.setattr(Hub, "COMMIT", "../../../../etc")
    with pytest.raises(CheckpointError, match="as a commit"):
        pull(store, "me/c", Wish())


def test_a_damaged_file_leaves_no_model(store: Store, hub: Hub, concierge: dict[str, bytes]) -> None:
    for bad in ("model.safetensors", "tokenizer_config.json"):
        name = f"me/{bad}"
        hub.put(name, concierge)
        hub.corrupt = {f"/{name}/{bad}"}
        with pytest.raises(CheckpointError, match="other bytes"):
            pull(store, name, Wish())
        assert store.find(name) is None
        hub.corrupt.clear()
        pull(store, name, Wish())
        assert store.find(name) is not None


def test_tokens_open_gated_models(store: Store, hub: Hub, concierge: dict[str, bytes]) -> None:
    hub.put("me/c", concierge)
    hub.gated.add("me/c")
    with pytest.raises(ConfigError, match=r"accepted.*HF_TOKEN"):
        pull(store, "me/c", Wish())
    pull(Store(replace(store.places, token="hf_x")), "me/c", Wish())
    assert {value for path, value in hub.authorised.items() if "resolve" in path} == {"Bearer hf_x"}


@pytest.mark.parametrize(
    ("name", "told"), [("me/none", "there is no model me/none"), ("me/c@v9", "has no revision 'v9'")]
)
def test_what_the_hub_lacks_is_told(store: Store, hub: Hub, name: str, told: str) -> None:
    hub.put("me/c", {"config.json": b"{}"})
    with pytest.raises(ConfigError, match=told):
        pull(store, name, Wish())


def test_pickles_are_not_pulled(store: Store, hub: Hub) -> None:
    hub.put("me/c", {"config.json": b"{}", "pytorch_model.bin": b"w"})
    with pytest.raises(ConfigError, match="a pickle"):
        pull(store, "me/c", Wish())


def test_offline_nothing_is_asked(store: Store, hub: Hub) -> None:
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE"):
        pull(Store(replace(store.places, offline=True)), "me/c", Wish())
    assert hub.asked == []


def test_a_hub_that_cannot_be_reached_is_told(places: ModelPlaces) -> None:
    with pytest.raises(ConfigError, match=r"cannot be reached|does not tell"):
        pull(Store(places), "me/c", Wish())


def test_a_model_that_cannot_run_is_refused_before_it_is_pulled(
    store: Store, hub: Hub, concierge: dict[str, bytes], quantised: Path
) -> None:
    hub.put("me/c", concierge)
    with pytest.raises(ConfigError, match=r"me/c cannot run here\. --force"):
        pull(store, "me/c", Wish(judge=refuse_all))
    assert "/me/c/model.safetensors" not in hub.sent
    data = quantised.read_bytes()
    hub.put("me/g", {"g-Q8_0.gguf": data, "g-Q4_0.gguf": data[: len(data) // 2]})
    seen: list[Outlook] = []

    def judge(outlook: Outlook) -> str:
        seen.append(outlook)
        return "no."

    wish = Wish(judge=judge)
    wish = replace(wish, manner=replace(wish.manner, part=1 << 20))
    with pytest.raises(ConfigError, match="no"):
        pull(store, "me/g:Q8_0", wish)
    assert hub.sent["/me/g/g-Q8_0.gguf"] <= 1 << 20
    assert not list((store.places.hub / "models--me--g/.penstock").glob("*.partial"))
    (outlook,) = seen
    assert outlook.facts is not None and outlook.facts.file_bytes == len(data) and outlook.facts.parameters > 1_000_000
    assert {name: facts.file_bytes for name, facts in outlook.others.items()} == {"hf.co/me/g:Q4_0": len(data) // 2}


def test_a_header_that_was_looked_at_is_not_loaded_again(store: Store, hub: Hub, quantised: Path) -> None:
    data = quantised.read_bytes()
    hub.put("me/g", {"g-Q8_0.gguf": data})
    wish = Wish(judge=lambda outlook: None)
    pull(store, "me/g:Q8_0", replace(wish, manner=replace(wish.manner, part=1 << 20)))
    assert hub.sent["/me/g/g-Q8_0.gguf"] == len(data)


def test_a_resumed_pull_that_is_refused_keeps_what_came(
    store: Store, hub: Hub, quantised: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.library.pull.open_web", lambda: open_web(lambda seconds: None))
    hub.put("me/g", {"g-Q8_0.gguf": quantised.read_bytes()})
    wish = Wish()
    wish = replace(wish, manner=replace(wish.manner, part=512 << 10))
    hub.budget = 4 << 20
    with pytest.raises(PenstockError):
        pull(store, "me/g:Q8_0", wish)
    hub.budget = None
    with pytest.raises(ConfigError, match="cannot run"):
        pull(store, "me/g:Q8_0", replace(wish, judge=refuse_all))
    before = sum(hub.sent.values())
    pull(store, "me/g:Q8_0", wish)
    assert sum(hub.sent.values()) - before < quantised.stat().st_size - (3 << 20)


def test_an_unknown_architecture_is_refused_by_name(
    store: Store, hub: Hub, concierge: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.library.pull.find_spec", lambda name: None)
    config = {**json.loads(concierge["config.json"]), "architectures": ["OddForCausalLM"]}
    hub.put("me/c", {**concierge, "config.json": json.dumps(config).encode()})
    with pytest.raises(CheckpointError, match="architecture OddForCausalLM"):
        pull(store, "me/c", Wish(judge=refuse_all))


def test_removing_frees_what_only_it_needed(store: Store, hub: Hub, concierge: dict[str, bytes]) -> None:
    hub.put("me/c", {**concierge, "c-Q8_0.gguf": b"8" * 1000, "c-Q4_0.gguf": b"4" * 1000})
    for name in ("me/c", "me/c:Q8_0", "me/c:Q4_0"):
        pull(store, name, Wish())
    assert [entry.name for entry in store.list()][:3] == ["hf.co/me/c:Q4_0", "hf.co/me/c:Q8_0", "me/c"]
    assert store.remove("me/c:Q8_0") == 1000
    assert store.find("me/c:Q4_0") is not None and store.find("me/c") is not None
    assert store.remove("me/c") > 13_000_000
    assert store.remove("me/c:Q4_0") == 1000
    assert not (store.places.hub / "models--me--c").exists()
    with pytest.raises(ConfigError, match="no model"):
        store.remove("me/c")


def test_an_adapter_is_pulled_and_found_by_its_name(
    store: Store, hub: Hub, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared_data / "models" / "penstock-concierge-lora-caps"
    files = {name: (folder / name).read_bytes() for name in ADAPTER_FILES}
    hub.put("people/caps", {**files, "README.md": b"Caps.", "optimizer.pt": b"x"})
    monkeypatch.setattr("penstock.library.adapters.open_store", lambda: store)
    with pytest.raises(CheckpointError, match="penstock pull people/caps"):
        adapter_path("people/caps")
    said: list[str] = []
    told = pull(store, "people/caps", Wish(say=said.append, judge=lambda outlook: "it is no model"))
    assert told == "people/caps" and "--lora-modules" in said[0]
    found = Path(adapter_path("people/caps"))
    assert sorted(path.name for path in found.iterdir()) == sorted(ADAPTER_FILES)
    assert adapter_digest(found) == adapter_digest(folder)
    assert store.find("people/caps") is None, "it is no model"
    assert AdapterNames(["caps=people/caps"]).all()[0].use.path == str(found)
    assert adapter_path(str(folder)) == str(folder) and adapter_path("./nothing/here") == "./nothing/here"
    (listed,) = store.adapters()
    assert (listed.name, listed.details["format"], listed.path) == ("people/caps", "adapter", found)
    assert listed.bytes == sum(map(len, files.values())) and "people/caps" not in [one.name for one in store.list()]
    assert store.remove("people/caps") == listed.bytes and store.adapters() == []
    assert not (store.places.hub / "models--people--caps").exists()
    with pytest.raises(CheckpointError, match="penstock pull people/caps"):
        adapter_path("people/caps")
