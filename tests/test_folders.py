"""Where things are kept, and what happens where nothing can be."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxllm
from jaxllm.errors import ModelNotFoundError
from jaxllm.folders import cache_or_temporary, existing, unwritable, user_folder
from jaxllm.weights.source import find_local, is_local_model, resolve_adapter, resolve_model, resolve_tokenizer
from tests.reference.tiny import write_checkpoint

pytestmark = pytest.mark.programs


def test_folders_are_where_the_desktop_standard_has_them(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder("XDG_CACHE_HOME", "~/.cache") == tmp_path / "jaxllm"
    monkeypatch.setenv("HOME", "/home/me")
    for said in ("", "relative/path"):  # which the standard says to ignore
        monkeypatch.setenv("XDG_CACHE_HOME", said)
        assert user_folder("XDG_CACHE_HOME", "~/.cache") == Path("/home/me/.cache/jaxllm")


def test_a_user_without_a_home_directory_can_import_everything():
    program = """
import os, pathlib
def nowhere(self):
    raise RuntimeError("Could not determine home directory.")
pathlib.Path.expanduser = nowhere
import jaxllm
from jaxllm.config import CACHE_DIR
from jaxllm.config.server import DATA_DIR
from jaxllm.text.tokenizer import Tokenizer
print(CACHE_DIR, DATA_DIR)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True)
    cache, data = done.stdout.split()
    assert cache != data and f"jaxllm-{os.getuid()}" in cache and f"jaxllm-{os.getuid()}" in data


def test_a_folder_that_cannot_be_made_is_replaced_and_said_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "cache"
    assert unwritable(tmp_path / "new") is None and unwritable(place) == "Not a directory"
    with caplog.at_level(logging.WARNING):
        first, second = (cache_or_temporary(place, "things", "set SOMETHING") for _ in range(2))
    assert first == second != place and unwritable(first) is None
    (record,) = caplog.records
    assert str(place) in record.message and "set SOMETHING" in record.message and "\n" not in record.message


GENERATE = """
import sys
from jaxllm import LLM, SamplingParams
fields = dict(max_model_len=64, max_num_seqs=2, kv_cache_memory=2**20, enforce_eager=True, skip_tokenizer_init=True)
with LLM(sys.argv[1], compile_cache_dir=sys.argv[2], **fields) as llm:
    print(llm.generate([[5, 6]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids)
"""


def test_an_engine_runs_where_no_cache_can_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "compile"
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    environment = {name: value for name, value in os.environ.items() if "COMPILATION_CACHE" not in name}
    command = [sys.executable, "-c", GENERATE, str(model), str(place)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (warning,) = [line for line in done.stderr.splitlines() if str(place) in line]
    assert "Not a directory; each start compiles; set compile_cache_dir to another folder" in warning


def test_a_server_whose_data_cannot_be_written_does_not_start(tmp_path):
    (tmp_path / "file").write_text("")
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    command = [sys.executable, "-m", "jaxllm", "serve", str(model), "--port", "0", "--data-dir", str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert f"data_dir is '{tmp_path / 'file'}', where nothing can be written: File exists" in line


def test_a_url_of_no_database_is_refused_before_a_model_is_loaded(tmp_path):
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    command = [sys.executable, "-m", "jaxllm", "serve", str(model), "--port", "0", "--database-url", "bogus"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "database_url cannot be used" in line


@pytest.mark.parametrize("text", ["~nobody-of-that-name/x", "x" * 5000, "x\0y"])
def test_a_text_that_can_be_no_path_is_no_model_tokenizer_or_adapter(text):
    assert existing(text) is None
    for look in (resolve_model, resolve_tokenizer, resolve_adapter, find_local):
        with pytest.raises(ModelNotFoundError) as caught:
            look(text)
        assert len(str(caught.value)) < 500
    assert not is_local_model(text)


def test_what_may_not_be_looked_at_is_said(monkeypatch, tmp_path):
    def refused(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refused)
    with pytest.raises(ModelNotFoundError, match="Permission denied"):
        resolve_model(str(tmp_path))


def test_every_path_of_a_user_is_looked_up_in_one_way():
    """Path.expanduser raises RuntimeError where a user or a home directory is not known; `in_home` does not."""
    sources = Path(jaxllm.__file__).parent.rglob("*.py")
    assert [str(file) for file in sources if ".expanduser()" in file.read_text()] == [jaxllm.folders.__file__]
