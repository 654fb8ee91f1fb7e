"""Adapters on a server of several models: each belongs to one of them, and its name is enough to find that."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from penstock.config.errors import ConfigError
from penstock.config.options import ServerOptions
from penstock.host.adapters import AdapterNames, of_several, pinned
from penstock.kernels.cpu import native
from penstock.llm import LLM
from tests.host.support import Engines, source
from tests.server.hosted import Hosting, hosting
from tests.server.served import listening
from tests.weights.adapters.test_peft import write

ADMIN = {"x-admin-key": "admin"}
ASKED = 16  # new connections, which the system deals among the processes
WAIT_S = 240


def tell(server: Hosting, path: str, body: object) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, headers=ADMIN, timeout=60)


def refusal(server: Hosting, path: str, body: object, status: int) -> dict[str, str]:
    answer = tell(server, path, body)
    assert answer.status_code == status, answer.text
    found: dict[str, str] = answer.json()["error"]
    return found


def completed(server: Hosting, **body: object) -> str:
    """The model that a completion says it is of."""
    answer = tell(server, "/v1/completions", {"prompt": "Hello", "max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["model"])


def test_each_belongs_to_a_model(engines: Engines, tmp_path: Path) -> None:
    one, two = (str(write(tmp_path / name, lora_alpha=8 + len(name))) for name in ("a", "bb"))
    models = (source("small", aliases=(("tiny", 1.0), ("any", 1.0))), source("large", aliases=(("any", 1.0),)))
    module = json.dumps({"name": "one", "path": one, "base_model_name": "tiny"})
    modules, sources = of_several((module,), lambda: {model.name: model for model in models})
    takes = {name: model.options is not None and model.options.enable_lora for name, model in sources().items()}
    assert takes == {"small": True, "large": False}, "only what has adapters gives memory for them"
    options = ServerOptions(lora_modules=modules, admin_keys=("admin",))
    with hosting(engines, *sources().values(), options=options) as server:
        assert completed(server, model="one") == "one" and engines.loads == ["small"]
        load = {"lora_name": "two", "lora_path": two}
        for base, said in ((None, "base_model_name"), ("any", "base_model_name"), ("nowhere", "not served here")):
            status = 404 if base == "nowhere" else 400
            error = refusal(server, "/v1/load_lora_adapter", {**load, "base_model_name": base}, status)
            assert said in error["message"]
        assert tell(server, "/load_lora_adapter", {**load, "base_model_name": "large"}).json()["success"]
        assert completed(server, model="two") == "two" and engines.loads == ["small", "large"]
        assert completed(server, model="tiny:one") == "one", "as SGLang's clients write it"
        for name in ("large:one", "any:one", "nowhere:one"):
            refusal(server, "/v1/completions", {"prompt": "Hello", "model": name}, 404)
        asked = {"prompt": "Hello", "model": "large", "lora_path": "one"}
        assert 'of "large"' in refusal(server, "/v1/completions", asked, 404)["message"]
        assert (
            "a model's"
            in refusal(server, "/v1/load_lora_adapter", {**load, "lora_name": "tiny", "base_model_name": "large"}, 400)[
                "message"
            ]
        )
        listed = {one["id"]: one for one in httpx.get(f"{server.url}/v1/models").json()["data"]}
        assert (listed["one"]["parent"], listed["two"]["parent"]) == ("small", "large")
        assert listed["small"]["parent"] is None and listed["two"]["max_model_len"] is not None
        assert httpx.get(f"{server.url}/v1/models/two").json()["adapter"] == {"id": 1, "rank": 4}
        assert [one["path"] for one in httpx.get(f"{server.url}/lora-adapters").json()] == ["one", "two"]
        assert httpx.get(f"{server.url}/v1/internal/lora/list").json()["lora_names"] == ["one", "two"]
        scaled = {"lora": [{"id": 1, "scale": 0.5}]}
        assert completed(server, model="large", **scaled) == "large"
        chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
        assert "(0)" in refusal(server, "/v1/chat/completions", {"model": "small", **chat, **scaled}, 400)["message"]
        assert tell(server, "/lora-adapters", [{"id": number, "scale": 0.5} for number in range(2)]).is_success
        assert "id" in refusal(server, "/lora-adapters", [{"id": 7, "scale": 1}], 400)["message"]
        assert tell(server, "/v1/unload_lora_adapter", {"lora_name": "two"}).status_code == 200
        assert tell(server, "/v1/completions", {"prompt": "Hello", "model": "two"}).status_code == 404
        assert completed(server, model="one") == "one"


def test_what_is_refused_at_the_start(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    models = {name: source(name) for name in ("small", "large")}
    for module, said in (
        (f"one={path}", "base_model_name"),
        (f'{{"name": "one", "path": "{path}", "base_model_name": "x"}}', "not served here"),
        (f'{{"name": "large", "path": "{path}", "base_model_name": "small"}}', "a model's"),
        (f'{{"name": "one", "path": "{path}", "base_model_name": 1}}', "base_model_name"),
    ):
        with pytest.raises(ConfigError, match=said):
            of_several((module,), lambda: models)
    alone, _ = of_several((f"one={path}",), lambda: {"small": models["small"]})
    assert json.loads(alone[0])["base_model_name"] == "small", "where there is one model it is meant"


def test_adapters_are_pinned_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a")
    names = AdapterNames(pinned((f"one={path}", f"two={path}"), ("two",)))
    assert [one.use.pinned for one in names.all()] == [False, True]
    with pytest.raises(ConfigError, match=r"--lora-pin is 'three'.*one"):
        pinned((f"one={path}",), ("three",))


@pytest.mark.skipif(not native.available(), reason="the native library is not built")
@pytest.mark.timeout(900)
def test_bits_are_those_of_a_server_of_one_model(shared_data: Path, tmp_path: Path) -> None:
    """Of two HTTP processes, whichever answers; the engine sleeps and wakes between two answers."""
    adapter = shared_data / "models" / "penstock-concierge-lora-caps"
    (tmp_path / "models.yaml").write_text(
        "models:\n"
        + "".join(f"  {n}: {{model: penstock-concierge, options: {{max_model_len: 256, threads: 1}}}}\n" for n in "ab")
    )
    with LLM("penstock-concierge", enable_lora=True, max_model_len=256, threads=1) as llm:
        alone, with_it = (
            llm.generate("Hello", adapter=path, max_tokens=8, temperature=0, logprobs=1)[0].outputs[0]
            for path in (None, str(adapter))
        )
    assert alone.text != with_it.text
    module = json.dumps({"name": "caps", "path": str(adapter), "base_model_name": "b"})
    flags = ["--models", str(tmp_path / "models.yaml"), "--port", "0", "--lora-modules", module, "--api-server-count"]
    served = listening("-m", "penstock", "serve", *flags, "2")
    try:
        for turn in range(2):
            for model, expected in (("caps", with_it), ("b", alone), ("a", alone)):
                body = {"model": model, "prompt": "Hello", "max_tokens": 8, "temperature": 0, "logprobs": 1}
                for _ in range(ASKED if model == "caps" else 1):
                    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=WAIT_S).json()
                    assert answer["model"] == model
                    choice = answer["choices"][0]
                    assert choice["text"] == expected.text
                    told = choice["logprobs"]["token_logprobs"]
                    assert told == [entry.logprob for entry in expected.logprobs], (turn, model)
            httpx.post(f"{served.url}/models/unload", json={"model": "b"}, timeout=WAIT_S).raise_for_status()
    finally:
        served.process.terminate()
        assert served.process.wait(WAIT_S) == 0
