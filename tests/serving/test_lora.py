"""Adapters by their names, by llama.cpp's numbers, and loaded while the server runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm.cli.main import main
from jaxllm.config import ModelConfig
from jaxllm.errors import ConfigError
from jaxllm.serving.served_model import LoadableModel
from jaxllm.serving.state import Registry
from tests.serving.access.conftest import write_keys
from tests.serving.fake_engine import FakeEngine
from tests.support.covers import covers

PROMPT = {"prompt": "Hi", "max_tokens": 2}
Make = Callable[..., TestClient]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[str, str]:
    """Of two adapters, which the canned engine does not read."""
    found = tmp_path / "sql", tmp_path / "poems"
    for folder in found:
        folder.mkdir()
    return str(found[0]), str(found[1])


@pytest.fixture
def client(make_client: Make, engine: FakeEngine, folders: tuple[str, str]) -> TestClient:
    sql, poems = folders
    modules = [{"name": "sql", "path": sql}, {"name": "poems", "path": poems, "scale": 0.5}]
    return make_client(engine, {"other": FakeEngine()}, enable_lora=True, lora_modules=modules)


def complete(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/completions", json=PROMPT | fields)


def error(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


def listed(client: TestClient) -> list[tuple[int, str, float]]:
    return [(one["id"], one["name"], one["scale"]) for one in client.get("/lora-adapters").json()]


def load(client: TestClient, name: str, path: str, **fields: Any) -> Any:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path} | fields)


def unload(client: TestClient, name: str, **fields: Any) -> Any:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name} | fields)


def test_adapters_are_listed_with_their_model(client: TestClient, folders: tuple[str, str]) -> None:
    models = client.get("/v1/models").json()["data"]
    shown = {model["id"]: (model["root"], model["parent"]) for model in models}
    assert shown == {
        "fake": ("fake", None), "other": ("other", None), "sql": (folders[0], "fake"), "poems": (folders[1], "fake"),
    }  # fmt: skip
    assert client.get("/v1/models/sql").json()["parent"] == "fake"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", PROMPT),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "store": False}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}),
        ("/v1/embeddings", {"input": "Hi"}),
    ],
)
def test_the_model_of_a_request_names_an_adapter(
    path: str, body: dict[str, Any], client: TestClient, engine: FakeEngine, folders: tuple[str, str]
) -> None:
    for name, scale, folder in (("sql", 1.0, folders[0]), ("poems", 0.5, folders[1])):
        answer = client.post(path, json=body | {"model": name})
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        [use] = engine.adapters[-1]
        assert (use.name, use.path, use.scale) == (name, folder, scale)
    client.post(path, json=body | {"model": "fake"}).raise_for_status()
    assert engine.adapters[-1] == ()


@covers("GenerationRequest", "lora")
@covers("AdapterScale", "id", "scale")
def test_the_field_lora_chooses_several_each_as_strong_as_it_says(client: TestClient, engine: FakeEngine) -> None:
    complete(client, lora=[{"id": 1, "scale": 0.25}, {"id": 0, "scale": 2}]).raise_for_status()
    assert {use.name: use.scale for use in engine.adapters[-1]} == {"sql": 2.0, "poems": 0.25}
    complete(client, lora=[{"id": 0, "scale": 0}, {"id": 1}]).raise_for_status()
    assert engine.adapters[-1] == ()
    complete(client, lora=[]).raise_for_status()
    assert engine.adapters[-1] == ()


def test_every_choice_of_a_request_uses_its_adapters(client: TestClient, engine: FakeEngine) -> None:
    complete(client, model="sql", prompt=["a", "b"], n=2).raise_for_status()
    assert [[use.name for use in uses] for uses in engine.adapters] == [["sql"], ["sql"]]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"lora": [{"id": 7}]}, "lora[0].id", "lora[0].id is 7; GET /lora-adapters lists 0, 1"),
        ({"lora": [{"id": -1}]}, "lora[0].id", "must be 0 or more"),
        ({"lora": [{"scale": 1}]}, "lora[0].id", "lora[0].id is required"),
        ({"lora": [{"id": 0, "scale": 1e9}]}, "lora[0].scale", "must be at most"),
        ({"lora": [{"id": 0}] * 300}, "lora", "lora has 300 entries; it may have 256"),
        ({"model": "sql", "lora": [{"id": 0}]}, "lora", "lora is set, but model 'sql' is an adapter already"),
        ({"model": "other", "lora": [{"id": 0}]}, "lora[0].id", "none: the model has no adapters"),
    ],
)
def test_what_cannot_be_chosen_is_refused(fields: dict[str, Any], param: str, said: str, client: TestClient) -> None:
    found = error(complete(client, **fields), 400)
    assert found["param"] == param
    assert said in found["message"]


@covers("GET /v1/lora-adapters")
@covers("POST /v1/lora-adapters")
def test_scales_that_are_set_are_those_of_requests_that_choose_none(client: TestClient, engine: FakeEngine) -> None:
    assert listed(client) == [(0, "sql", 0.0), (1, "poems", 0.0)]
    set_scales = client.post("/lora-adapters", json=[{"id": 1, "scale": 0.75}])
    assert (set_scales.status_code, set_scales.json()) == (200, {"success": True})
    assert listed(client) == [(0, "sql", 0.0), (1, "poems", 0.75)]
    complete(client).raise_for_status()
    assert [(use.name, use.scale) for use in engine.adapters[-1]] == [("poems", 0.75)]
    complete(client, model="sql").raise_for_status()
    assert [use.name for use in engine.adapters[-1]] == ["sql"]
    complete(client, lora=[]).raise_for_status()
    assert engine.adapters[-1] == ()
    client.post("/lora-adapters", json=[]).raise_for_status()
    complete(client).raise_for_status()
    assert engine.adapters[-1] == ()


@covers("GET /v1/lora-adapters", "model")
@covers("POST /v1/lora-adapters", "model")
def test_other_models_have_adapters_of_their_own(client: TestClient) -> None:
    assert client.get("/lora-adapters", params={"model": "other"}).json() == []
    found = error(client.post("/lora-adapters", params={"model": "other"}, json=[]), 400)
    assert found["message"] == "model 'other' takes no adapters; start the server with --enable-lora"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"id": 0}', "it must be a JSON list"),
        (b"[{", "the body is not valid JSON"),
        (b'[{"id": "0"}]', "[0].id is '0'; it must be an integer"),
        (b'[{"id": 9}]', "[0].id is 9; GET /lora-adapters lists 0, 1"),
        (b"[" + b" " * 70_000 + b"]", "the body is larger than"),
    ],
)
def test_scales_are_a_list_of_known_adapters(body: bytes, said: str, client: TestClient) -> None:
    answer = client.post("/lora-adapters", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 413)
    assert said in answer.json()["error"]["message"]
    assert listed(client) == [(0, "sql", 0.0), (1, "poems", 0.0)]


@covers("POST /v1/load_lora_adapter")
@covers("LoadLoRARequest", "lora_name", "lora_path")
def test_an_adapter_is_loaded_once_the_engine_has_used_it(
    client: TestClient, engine: FakeEngine, folders: tuple[str, str]
) -> None:
    answer = load(client, "more", folders[0])
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'more' added successfully.")
    [[use]] = engine.adapters
    assert (use.name, use.path, use.scale) == ("more", folders[0], 1.0)
    assert client.get("/v1/models/more").json()["parent"] == "fake"
    complete(client, model="more").raise_for_status()
    assert engine.adapters[-1] == engine.adapters[0]


@covers("LoadLoRARequest", "load_inplace", "is_3d_lora_weight")
def test_one_that_is_loaded_anew_is_another_one(
    client: TestClient, engine: FakeEngine, folders: tuple[str, str]
) -> None:
    found = error(load(client, "sql", folders[1]), 400)
    assert found["type"] == "InvalidUserInput"
    assert found["message"] == (
        "The lora adapter 'sql' has already been loaded. If you want to load the adapter in place, set 'load_inplace' "
        "to True."
    )
    complete(client, model="sql").raise_for_status()
    [old] = engine.adapters[-1]
    load(client, "sql", folders[1], load_inplace=True, is_3d_lora_weight=False).raise_for_status()
    complete(client, model="sql").raise_for_status()
    [use] = engine.adapters[-1]
    assert use.path == folders[1] and use.id != old.id
    assert listed(client) == [(1, "poems", 0.0), (2, "sql", 0.0)]
    assert "is_3d_lora_weight" in error(load(client, "a", folders[1], is_3d_lora_weight=True), 400)["message"]


@covers("POST /v1/unload_lora_adapter")
@covers("UnloadLoRARequest", "lora_name", "lora_int_id")
def test_an_adapter_that_is_unloaded_is_not_found(client: TestClient, folders: tuple[str, str]) -> None:
    client.post("/lora-adapters", json=[{"id": 0, "scale": 1}]).raise_for_status()
    answer = unload(client, "sql", lora_int_id=99)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    assert error(complete(client, model="sql"), 404)["code"] == "model_not_found"
    found = error(unload(client, "sql"), 404)
    assert (found["type"], found["message"]) == ("NotFoundError", "The lora adapter 'sql' cannot be found.")
    load(client, "sql", folders[0]).raise_for_status()
    assert listed(client) == [(1, "poems", 0.0), (2, "sql", 0.0)]


@covers("LoadLoRARequest", "base_model_name")
def test_an_adapter_is_for_the_model_that_it_names(
    make_client: Make, engine: FakeEngine, folders: tuple[str, str]
) -> None:
    client = make_client(engine, {"other": FakeEngine()}, enable_lora=True, served_model_name="fake,alias")
    load(client, "more", folders[0], base_model_name="alias").raise_for_status()
    assert client.get("/v1/models/more").json()["parent"] == "alias"
    assert error(load(client, "x", folders[0], base_model_name="none"), 404)["code"] == "model_not_found"
    assert error(load(client, "x", folders[0], base_model_name="other"), 400)["code"] == "adapters_disabled"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"lora_path": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "x"}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
        ({"lora_name": "fake", "lora_path": "."}, 400, "lora_name is 'fake', which is the name of a model"),
        ({"lora_name": "x", "lora_path": "./nowhere"}, 404, "'./nowhere' is no folder, .gguf file or hub id"),
        ({"lora_name": "x", "lora_path": "loras/x"}, 404, "'loras/x' is no folder or file here; as a hub id: "),
        ({"lora_name": "x", "lora_path": "/etc/passwd"}, 404, "'/etc/passwd' is no folder, .gguf file or hub id"),
        ({"lora_name": "x" * 300, "lora_path": "."}, 400, "lora_name"),
        ({"lora_name": "a\nb", "lora_path": "."}, 400, r"lora_name is 'a\nb'; it must be printable characters"),
        ({"lora_name": " ", "lora_path": "."}, 400, "lora_name is ' '; it must be printable characters"),
        ({"lora_name": "a,b", "lora_path": "."}, 400, "lora_name is 'a,b'; it must be printable characters"),
        ({"lora_name": "x", "lora_path": "~nobody-of-that-name/x"}, 404, "is no folder, .gguf file or hub id"),
    ],
)
def test_what_cannot_be_loaded_is_refused(body: dict[str, str], status: int, said: str, client: TestClient) -> None:
    assert said in error(client.post("/v1/load_lora_adapter", json=body), status)["message"]
    assert len(listed(client)) == 2


def test_what_the_engine_cannot_use_is_not_kept(
    client: TestClient, engine: FakeEngine, folders: tuple[str, str]
) -> None:
    engine.refused_adapters.add(folders[0])
    found = error(load(client, "more", folders[0]), 400)
    assert found["message"] == f"adapter 'more' cannot be used: {folders[0]}: its rank is 64"
    assert error(complete(client, model="more"), 404)["code"] == "model_not_found"
    assert error(load(client, "sql", folders[0], load_inplace=True), 400)["code"] == "adapter_refused"
    complete(client, model="poems").raise_for_status()  # and the older ones stay
    assert [name for _, name, _ in listed(client)] == ["sql", "poems"]


def test_the_routes_ask_for_the_key(make_client: Make, engine: FakeEngine) -> None:
    client = make_client(engine, enable_lora=True, api_key="secret")
    for method, path in (("post", "load_lora_adapter"), ("post", "unload_lora_adapter"), ("get", "lora-adapters"),
                         ("post", "lora-adapters")):  # fmt: skip
        assert error(client.request(method, f"/v1/{path}", json=[]), 401)["code"] == "invalid_api_key"


def test_a_key_may_use_an_adapter_without_its_model(
    make_client: Make, engine: FakeEngine, folders: tuple[str, str], tmp_path: Path
) -> None:
    keys = write_keys(tmp_path / "keys.yaml", clerk={"models": ["sql"]}, user={"models": ["fake"]})
    modules = [f"{name}={path}" for name, path in zip(("sql", "poems"), folders, strict=True)]
    client = make_client(engine, enable_lora=True, lora_modules=modules, api_key_file=keys)

    def names(key: str) -> list[str]:
        client.headers["Authorization"] = f"Bearer {key}"
        return [model["id"] for model in client.get("/v1/models").json()["data"]]

    assert names("key-of-user") == ["fake", "sql", "poems"]
    assert error(load(client, "more", folders[0]), 403)["message"] == (
        "this API key may not load and unload adapters, or say which are used; that needs `admin: true` in the file of "
        "keys"
    )
    assert error(unload(client, "sql"), 403)["code"] == "not_admin"
    assert error(client.post("/lora-adapters", json=[]), 403)["code"] == "not_admin"
    assert names("key-of-clerk") == ["sql"]
    assert complete(client, model="sql").status_code == 200
    for name in ("fake", "poems"):
        assert error(complete(client, model=name), 404)["code"] == "model_not_found"


def test_a_model_that_starts_has_used_its_adapters(folders: tuple[str, str]) -> None:
    engine, sql, poems = FakeEngine(), *folders
    config = ModelConfig(model="m", enable_lora=True, lora_modules=f"sql={sql}, poems={poems}")
    model = LoadableModel(config, lambda *_: engine)
    model.load()
    assert [[use.name for use in uses] for uses in engine.adapters] == [["sql"], ["poems"]]
    engine.shutdown()
    broken = FakeEngine()
    broken.refused_adapters.add(poems)
    with pytest.raises(ConfigError, match=r"lora_modules: adapter 'poems' cannot be used: .*its rank is 64"):
        LoadableModel(config, lambda *_: broken).load()
    assert broken.is_dead
    nowhere = ModelConfig(model="m", enable_lora=True, lora_modules="sql=./nowhere")
    with pytest.raises(ConfigError, match=r"lora_modules: adapter './nowhere' is no folder"):
        LoadableModel(nowhere, lambda *_: FakeEngine()).load()


@pytest.mark.parametrize("name", ["m", "n", "sql"])
def test_adapters_and_models_have_names_of_their_own(name: str) -> None:
    first = ModelConfig(model="m", enable_lora=True, lora_modules="sql=a")
    second = ModelConfig(model="n", enable_lora=True, lora_modules=f"{name}=b")
    models = [LoadableModel(config, lambda *_: FakeEngine()) for config in (first, second)]
    with pytest.raises(ConfigError, match=f"lora_modules has the name {name!r}, which another model or adapter has"):
        Registry(models)


def test_the_command_line_shows_adapters(
    listen: Callable[..., str], folders: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    url = listen(FakeEngine(), enable_lora=True, lora_modules=f"sql={folders[0]}")
    with pytest.raises(SystemExit):
        main(["models", "--server", url])
    assert "adapter of fake" in capsys.readouterr().out
