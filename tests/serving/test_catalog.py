"""Which models a server has: of a file, of a folder, and of the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxllm.config import ModelConfig, ServeConfig, make_config, part_of
from jaxllm.errors import ConfigError
from jaxllm.serving import catalog
from jaxllm.serving.access.keys import OTHERS
from jaxllm.serving.catalog import CatalogEntry, ServerModels, read_catalog
from jaxllm.serving.http.api_error import APIError
from jaxllm.weights.folder import MANIFEST
from tests.serving.on_demand import Starts


def written(folder: Path, document: Any) -> Path:
    path = folder / "models.yaml"
    path.write_text(document if isinstance(document, str) else yaml.safe_dump(document, sort_keys=False))
    return path


def read(folder: Path, document: Any, **settings: Any) -> list[CatalogEntry]:
    return read_catalog(ServeConfig(models=written(folder, document), **settings))


@pytest.mark.parametrize(
    "document",
    [
        {"models": [{"name": "a", "model": "org/a"}, {"name": "b", "model": "org/b", "aliases": ["c", "d"]}]},
        {"a": {"model": "org/a"}, "b": {"model": "org/b", "aliases": "c, d"}},
        {"models": {"a": {"model": "org/a"}, "b": {"model": "org/b", "aliases": ["c", "d"]}}},
    ],
    ids=["a list", "names", "names in models"],
)
def test_a_file_lists_models_by_name(tmp_path: Path, document: Any) -> None:
    first, second = read(tmp_path, document)
    assert (first.names, first.model) == (["a"], "org/a")
    assert (second.names, second.model) == (["b", "c", "d"], "org/b")
    assert second.of_model.names == ["b", "c", "d"] and second.of_model.engine_process is True
    assert not (first.preload or first.pinned or first.hidden) and first.ttl is None


def test_settings_of_the_command_line_are_defaults_of_all(tmp_path: Path) -> None:
    document = {"a": {"model": "m", "max_model_len": 64, "ttl": None}, "b": {"model": "n", "preload": True}}
    first, second = read(tmp_path, document, max_model_len=128, isq="q4k", model_ttl=60)
    assert (first.max_model_len, second.max_model_len, first.isq, second.isq) == (64, 128, "q4k", "q4k")
    assert (first.ttl, second.ttl, first.preload, second.preload) == (None, 60, False, True)
    own = second.of_model
    assert type(own) is ModelConfig
    assert own == part_of(
        ServeConfig(model="n", max_model_len=128, isq="q4k", served_model_name="b"), ModelConfig
    ).model_copy(update={"engine_process": True})


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    [entry] = read(tmp_path, {"a": {"model": "~/m", "chat_template": "~/t.jinja"}})
    assert (entry.model, entry.chat_template) == ("/home/me/m", Path("/home/me/t.jinja"))


def test_the_model_of_the_command_line_comes_first(tmp_path: Path) -> None:
    document = {"a": {"model": "m"}, "b": {"model": "n", "aliases": ["x"]}}

    def names(**settings: Any) -> list[str]:
        return [entry.name for entry in read(tmp_path, document, **settings)]

    assert names() == ["a", "b"]
    assert names(model="b") == names(model="x") == ["b", "a"]
    assert names(model="org/c") == ["org/c", "a", "b"]
    assert names(model="org/c", served_model_name="c,d") == ["c", "a", "b"]
    assert read(tmp_path, document, model="org/c", served_model_name="c,d")[0].names == ["c", "d"]


def test_a_name_with_a_star_stands_for_others(tmp_path: Path) -> None:
    [entry, other] = read(
        tmp_path, {"b": {"model": "n", "aliases": ["claude-*"]}}, model="org/c", served_model_name="*-mini,c,d"
    )
    assert (entry.name, entry.of_model.names, entry.of_model.name_patterns) == ("c", ["c", "d"], ["*-mini"])
    assert (other.of_model.names, other.of_model.name_patterns) == (["b"], ["claude-*"])
    [alone] = read_catalog(ServeConfig(models=written(tmp_path, {"b": {"model": "n", "aliases": "x*,y"}})))
    assert alone.of_model.names == ["b", "y"]
    assert ServeConfig(model="org/c", served_model_name="claude-*").names == ["org/c"]
    with pytest.raises(ConfigError, match=r"name is 'c\*', which stands for other names"):
        read(tmp_path, {"c*": {"model": "n"}})
    with pytest.raises(ConfigError, match=r"served_model_name has 'a\*b\*'; a name may have one \*"):
        make_config(ServeConfig, model="m", served_model_name="a*b*")


def test_a_folder_s_models_have_the_names_of_their_files(tmp_path: Path) -> None:
    for name in ("small.gguf", "large-00001-of-00002.gguf", "large-00002-of-00002.gguf", "notes.txt"):
        (tmp_path / name).touch()
    for name in ("phi", "no-model", "converted"):
        (tmp_path / name).mkdir()
    (tmp_path / "phi" / "config.json").write_text(json.dumps({}))
    (tmp_path / "converted" / MANIFEST).touch()
    entries = read_catalog(ServeConfig(model_directory=tmp_path, max_model_len=64))
    assert {entry.name: entry.model for entry in entries} == {
        "converted": str(tmp_path / "converted"),
        "large": str(tmp_path / "large-00001-of-00002.gguf"),
        "phi": str(tmp_path / "phi"),
        "small": str(tmp_path / "small.gguf"),
    }
    assert {entry.max_model_len for entry in entries} == {64}


def test_a_file_and_a_folder_are_served_together(tmp_path: Path) -> None:
    (tmp_path / "small.gguf").touch()
    both = {"model_directory": tmp_path}
    assert [entry.name for entry in read(tmp_path, {"a": {"model": "m"}}, **both)] == ["a", "small"]
    with pytest.raises(ConfigError, match=r"small\.gguf: the name 'small' is taken by .*models\.yaml: model 'small'"):
        read(tmp_path, {"small": {"model": "m"}}, **both)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"a": {"model": "m", "max_model_length": 5}}, "'max_model_length'; did you mean 'max_model_len'?"),
        ({"a": {"model": "m", "prelod": True}}, "model 'a': unknown setting 'prelod'; did you mean 'preload'?"),
        ({"a": {"model": "m", "port": 5}}, "model 'a': unknown setting 'port'"),
        ({"a": {"model": "m", "max_model_len": -5}}, "model 'a': max_model_len is -5: it must be 1 or more"),
        ({"a": {"model": "m", "served_model_name": "b"}}, "model 'a': served_model_name is called name here"),
        ({"a": {"model": "m", "name": "b"}}, "model 'a': name is set again; the key is the name"),
        ({"a": {"isq": "q4k"}}, "model 'a': model is missing"),
        ({"a": "m"}, "model 'a' is 'm'; it must be a mapping of setting: value"),
        ({"models": [{"model": "m"}]}, r"models\[0\]: name is missing"),
        ({"models": [], "defaults": {}}, "unknown key 'defaults' beside 'models'"),
        ({"models": "m"}, "models is 'm'; it must be a list of models"),
        ({"models": [{"name": "a", "model": "m"}, {"name": "a", "model": "n"}]}, r"models\[1\]: the name 'a' is taken"),
        ({"a": {"model": "m"}, "b": {"model": "n", "aliases": ["a"]}}, "the name 'a' is taken by .*model 'a'"),
        ({"a,b": {"model": "m"}}, "'a,b' is no name: it must be printable characters, without a comma"),
        ({"a\nb": {"model": "m"}}, r"'a\\nb' is no name: it must be printable characters"),
        ({"a": {"model": "m", "preload": True}, "b": {"model": "n", "preload": True}}, "models to preload are 2"),
        ({"a": {"model": "m", "pinned": True}, "b": {"model": "n"}}, "pinned models are 1; max_loaded_models is 1"),
        ("a: {model: m}\na: {model: n}\n", "'a' is set in line 1 and again in line 2"),
        ("- a\n", "holds a list; it must be a mapping of names to models"),
        ("", "there is no model to serve in .*models.yaml: give a MODEL, or put one there"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_line(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        read(tmp_path, document)
    assert "\n" not in str(raised.value)


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    assert read_catalog(ServeConfig(model="m", engine_process=False)) == []
    with pytest.raises(ConfigError, match="model_ttl is for servers of several models"):
        read_catalog(ServeConfig(model_ttl=5))
    with pytest.raises(ConfigError, match="engine_process is False"):
        read(tmp_path, {"a": {"model": "m"}}, engine_process=False)
    with pytest.raises(ConfigError, match="served_model_name is the name of MODEL, which is missing"):
        read(tmp_path, {"a": {"model": "m"}}, served_model_name="b")
    with pytest.raises(ConfigError, match=r"model_directory is .*: no such file"):
        read_catalog(ServeConfig(model_directory=tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"--models is .*: no such file"):
        read_catalog(ServeConfig(models=tmp_path / "none"))
    with pytest.raises(ConfigError, match="there is no model to serve in"):
        read_catalog(ServeConfig(model_directory=tmp_path))


@pytest.mark.parametrize(
    "adapters", [{"sql": "/a", "poems": "org/b"}, ["sql=/a", {"name": "poems", "path": "org/b"}], "sql=/a,poems=org/b"]
)
def test_a_model_has_adapters(tmp_path: Path, adapters: Any) -> None:
    first, second = read(tmp_path, {"a": {"model": "m", "adapters": adapters}, "b": {"model": "n"}})
    own = first.of_model
    assert own.enable_lora and own.lora_modules is not None
    assert {module.name: module.path for module in own.lora_modules} == {"sql": "/a", "poems": "org/b"}
    assert second.of_model.lora_modules is None and not second.enable_lora


def test_adapters_of_several_models_are_in_their_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lora_modules is for servers of one model; models in a file have theirs as"):
        read(tmp_path, {"a": {"model": "m"}}, lora_modules="a=b")
    with pytest.raises(ConfigError, match="model 'a': lora_modules is called adapters here"):
        read(tmp_path, {"a": {"model": "m", "lora_modules": "a=b"}})
    with pytest.raises(ConfigError, match="model 'a': adapters is set, and enable_lora is false"):
        read(tmp_path, {"a": {"model": "m", "adapters": "a=b", "enable_lora": False}})


def test_sizes_of_adapters_are_for_those_that_take_some(tmp_path: Path) -> None:
    document = {"a": {"model": "m"}, "b": {"model": "n", "adapters": "x=/x"}}
    first, second = read(tmp_path, document, max_loras=2)
    assert not first.enable_lora and (second.enable_lora, second.max_loras) == (True, 2)
    with pytest.raises(ConfigError, match=r"model 'a': max_loras is 2, and enable_lora is false"):
        read(tmp_path, {"a": {"model": "m", "max_loras": 2}})


def test_models_are_preloaded_by_name_or_file(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "c.gguf"):
        (tmp_path / name).touch()
    several = {"model_directory": tmp_path, "max_loaded_models": 2}
    entries = read_catalog(ServeConfig(**several, preload_model="c, a.gguf"))
    assert {entry.name: entry.preload for entry in entries} == {"a": True, "b": False, "c": True}
    with pytest.raises(ConfigError, match=r"^preload_model is 'd', and the models are a, b, c"):
        read_catalog(ServeConfig(**several, preload_model="d"))
    with pytest.raises(ConfigError, match="preload_model is for servers of several models"):
        read_catalog(ServeConfig(preload_model="a"))


def test_a_folder_s_models_come_and_go_while_the_server_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(catalog, "_start_engine", Starts())
    (tmp_path / "a.gguf").touch()
    models = ServerModels(ServeConfig(model_directory=tmp_path, max_model_len=64))
    registry = models.start()
    assert registry.names_for(OTHERS) == ["a"] and registry.find("claude-x").name == "a"
    (tmp_path / "phi").mkdir()
    with pytest.raises(APIError, match="model 'phi' is not served here"):
        registry.find("phi")
    (tmp_path / "phi" / "config.json").write_text("{}")  # which changes the times of that folder alone
    phi = registry.find("phi")
    assert (phi.config.model, phi.config.max_model_len) == (str(tmp_path / "phi"), 64)
    (tmp_path / "b.gguf").touch()
    assert registry.names_for(OTHERS) == ["a", "phi", "b"]
    (tmp_path / "phi.gguf").touch()
    for _ in range(2):
        assert registry.names_for(OTHERS) == ["a", "phi", "b"]
    (problem,) = errors(caplog)
    assert "the models stay as they are" in problem and "the name 'phi' is taken" in problem
    (tmp_path / "phi.gguf").unlink()
    with pytest.raises(APIError, match="not served here"):
        registry.find("claude-x")  # it is no longer the only one
    phi.load()
    shutil.rmtree(tmp_path / "phi")
    (tmp_path / "b.gguf").unlink()
    assert registry.names_for(OTHERS) == ["a", "phi"]  # it is loaded
    phi.detach().engine.shutdown()
    assert registry.names_for(OTHERS) == ["a"] == [model.name for model in registry.loader._models]
    (tmp_path / "b.gguf").touch()
    assert registry.find("b:latest").name == "b"
    shutil.rmtree(tmp_path)
    assert registry.names_for(OTHERS) == ["a", "b"] and "the models stay as they are" in errors(caplog)[-1]
    models.shutdown()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
