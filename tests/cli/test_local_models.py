"""list, show, rm and ps: what is on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm.serving import running
from tests.weights.models import real_model


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one built-in model in it, and an empty cache of the hub's."""
    hub = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(hub))
    model = real_model("gemma3-270m")
    folder = tmp_path / "models" / "gemma3-270m"
    folder.mkdir(parents=True)
    (folder / model.name).symlink_to(model)
    return tmp_path / "models"


def cache_repository(hub: Path, name: str, **files: bytes) -> Path:
    """A repository as the hub's library keeps it."""
    root = hub / f"models--{name.replace('/', '--')}"
    snapshot = root / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("a" * 40)
    for number, (file, content) in enumerate(files.items()):
        blob = root / "blobs" / f"{number:040x}"
        blob.write_bytes(content)
        (snapshot / file.replace("__", ".")).symlink_to(blob)
    return snapshot


def test_list_has_built_in_and_downloaded_models(cli, downloads: Path, tmp_path: Path) -> None:
    cache_repository(tmp_path / "hub", "org/small", config__json=b"{}", model__safetensors=b"x" * 99)
    cache_repository(tmp_path / "hub", "org/files", a__gguf=b"x" * 7, b__gguf=b"x" * 8)
    rows = json.loads(cli("list", "--download-dir", str(downloads), "--json").out)
    found = {row["name"]: (row["nbytes"], row["path"] is not None) for row in rows}
    assert found["gemma3-270m"][1] and not found["smollm2-135m"][1]
    assert found["org/small"] == (101, True)
    assert (found["org/files:a.gguf"], found["org/files:b.gguf"]) == ((7, True), (8, True))
    table = cli("list", "--download-dir", str(downloads)).out
    assert "jaxllm pull smollm2-135m" in table and "241.4 MiB" in table


def test_show_says_what_a_model_is(cli, downloads: Path) -> None:
    facts = json.loads(cli("show", "gemma3-270m", "--download-dir", str(downloads), "--json").out)
    assert (facts["family"], facts["context"], facts["chat_template"]) == ("Gemma 3", 32768, False)
    assert facts["licence"] == "Gemma terms of use" and 268_000_000 < facts["parameters"] < 269_000_000
    assert sum(facts["weights"].values()) == facts["parameters"] and "Q4_K" in facts["weights"]
    assert "no: it continues text" in cli("show", "gemma3-270m", "--download-dir", str(downloads)).out


def test_show_and_rm_fetch_nothing(cli, downloads: Path) -> None:
    for command in ("show", "rm"):
        result = cli(command, "smollm2-135m", "--download-dir", str(downloads))
        assert result.code == 2 and "is not on this machine" in result.err and "`jaxllm pull`" in result.err


def test_rm_asks_and_removes(cli, downloads: Path, tmp_path: Path, monkeypatch) -> None:
    folder, at = downloads / "gemma3-270m", ("--download-dir", str(downloads))
    assert "say --yes" in cli("rm", "gemma3-270m", *at).err and folder.exists()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "")
    assert cli("rm", "gemma3-270m", *at).out == "kept\n" and folder.exists()
    monkeypatch.setattr("builtins.input", lambda question: "y" if "241.4 MiB" in question else "")
    assert cli("rm", "gemma3-270m", *at).out == "removed gemma3-270m\n" and not folder.exists()
    assert real_model("gemma3-270m").exists()
    assert "needs the name" in cli("rm").err


def test_rm_removes_what_the_hub_gave_and_nothing_of_ones_own(cli, downloads: Path, tmp_path: Path) -> None:
    snapshot = cache_repository(tmp_path / "hub", "org/small", model__safetensors=b"x")
    files = cache_repository(tmp_path / "hub", "org/files", a__gguf=b"x", b__gguf=b"y")
    copies = [cache_repository(tmp_path / "hub", f"copy{n}/small", model__safetensors=b"x") for n in range(9)]
    assert cli("rm", "org/small", "--yes").code == 0 and not snapshot.exists()
    assert files.exists() and all(copy.exists() for copy in copies)  # of the same commit
    assert cli("rm", "org/files:a.gguf", "--yes").code == 0
    assert [file.name for file in files.iterdir()] == ["b.gguf"]
    mine = tmp_path / "mine.gguf"
    mine.touch()
    for command in (("rm", str(mine), "--yes"), ("rm", str(mine))):  # it is not asked about first
        assert "of yours" in cli(*command).err and mine.exists()


def test_rm_leaves_copies_of_a_repository(cli, downloads: Path, tmp_path: Path) -> None:
    """They have the same commits."""
    copies = {name: cache_repository(tmp_path / "hub", name, a__safetensors=b"x") for name in ("a/x", "b/x", "c/x")}
    copies["d/x"] = cache_repository(tmp_path / "hub", "d/x", a__safetensors=b"x")
    (tmp_path / "hub" / "models--d--x").rename(tmp_path / "hub" / "datasets--d--x")
    for name in ("c/x", "a/x"):
        copies.pop(name)
        assert cli("rm", name, "--yes").code == 0
        copies.pop("d/x", None)
        assert all(snapshot.exists() for snapshot in copies.values())
    assert cli("rm", "d/x", "--yes").code == 2 and (tmp_path / "hub" / "datasets--d--x").exists()


def test_ps_lists_servers_until_they_end(cli, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(running, "FOLDER", tmp_path / "running")
    assert "no server runs" in cli("ps").out
    with running.noted(["a", "b"], "http://127.0.0.1:8000"):
        (found,) = json.loads(cli("ps", "--json").out)
        assert (found["pid"], found["models"], found["address"]) == (os.getpid(), ["a", "b"], "http://127.0.0.1:8000")
        assert found["nbytes"] > 10**6
        assert "http://127.0.0.1:8000" in cli("ps").out
    assert json.loads(cli("ps", "--json").out) == []


def test_ps_forgets_servers_that_were_killed(cli, tmp_path: Path, monkeypatch) -> None:
    """Their numbers may belong to other processes by now."""
    folder = tmp_path / "running"
    folder.mkdir()
    monkeypatch.setattr(running, "FOLDER", folder)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    note = {"models": ["a"], "address": "x"}
    for pid, content in ((ended.pid, note | {"started": 1.0}), (os.getpid(), note | {"started": 1.0}), (1, [])):
        (folder / f"{pid}.json").write_text(json.dumps(content))
    assert json.loads(cli("ps", "--json").out) == [] and list(folder.iterdir()) == []


def test_a_server_goes_on_where_it_cannot_be_noted(tmp_path: Path, monkeypatch, caplog) -> None:
    (tmp_path / "running").touch()
    monkeypatch.setattr(running, "FOLDER", tmp_path / "running" / "inside")
    with running.noted(["a"], "x"):
        assert "set XDG_CACHE_HOME" in caplog.text
