"""Executables that the next start loads instead of compiling."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxllm import LLM, EngineConfig, compat
from jaxllm.engine.core.executables import Executables
from jaxllm.engine.core.keys import PLAIN, SAMPLED, Key
from jaxllm.engine.core.saved import KEPT_SETS, SETS, SavedExecutables, make_room
from jaxllm.engine.core.sizes import Buckets
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.plan import Blueprint, step_functions
from jaxllm.engine.start.platform import Platform
from jaxllm.engine.start.prepared import step_manifest
from jaxllm.sharding.mesh import build_meshes
from jaxllm.weights import open_checkpoint
from tests.reference.tiny import write_checkpoint

ADMIT, ADJUST = Key("put", 0, frozenset({"admit"})), Key("put", 0, frozenset({"adjustments"}))
SCORE = Key("read", 2, frozenset({"score_all"}))
KEYS = (
    Key("backbone", 16),
    Key("head", 2, SAMPLED),
    Key("decode", 2, PLAIN),
    ADMIT,
    SCORE,
    Key("put", 0, frozenset({"steering"})),
)


@pytest.fixture(scope="module", autouse=True)
def compiled_afresh(tmp_path_factory) -> Iterator[None]:
    """What comes out of XLA's own cache is not saved."""
    before = jax.config.jax_compilation_cache_dir
    for directory in (str(tmp_path_factory.mktemp("cache")), before):
        jax.config.update("jax_compilation_cache_dir", directory)
        compilation_cache.reset_cache()
        if directory != before:
            yield


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(write_checkpoint("llama_gqa", tmp_path_factory.mktemp("model")))


def blueprint_of(model: str, **fields: Any) -> Blueprint:
    fields = {"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_memory": 2**20} | fields
    return make_blueprint(
        EngineConfig(model=model, **fields), open_checkpoint(Path(model)), Platform("cpu", 1, None, 2**33)
    )


@pytest.fixture(scope="module")
def functions(model) -> StepFunctions:
    return step_functions(blueprint_of(model), build_meshes(1)[0])


def saved_in(root: Path, name: str = "model") -> SavedExecutables:
    return SavedExecutables(root, {"model": name}, jax.devices()[:1])


def executables(functions: StepFunctions, root: Path) -> Executables:
    return Executables(functions, Buckets.build(2, 16), eager=True, saved=saved_in(root))


def outcome(compiled: Any, functions: StepFunctions, key: Key) -> list[np.ndarray]:
    """What a step gives for arguments that are drawn anew in the same way."""
    dice = np.random.default_rng(3)
    abstract = functions.step(key)[1]

    def made(a: jax.ShapeDtypeStruct) -> jax.Array:
        values = dice.random(a.shape) if a.dtype == np.float32 else np.zeros(a.shape)
        return jax.device_put(values.astype(a.dtype), a.sharding)

    return [np.asarray(x) for x in jax.tree.leaves(compiled(*jax.tree.map(made, abstract)))]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_a_loaded_step_does_what_the_compiled_one_did(functions, tmp_path, key, monkeypatch):
    expected = outcome(executables(functions, tmp_path).get(key), functions, key)
    monkeypatch.setattr("jaxllm.engine.core.executables.compile_lowered", None)
    again = executables(functions, tmp_path)
    found = outcome(again.get(key), functions, key)
    assert again.compiles.seconds == 0
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[:-1])
    elif how == "longer":
        path.write_bytes(content + b"\0")
    elif how == "changed":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif how == "another file":
        path.write_bytes(b"GGUF" + content)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "another step":
        path.write_bytes(path.with_name(f"{SCORE}.executable").read_bytes())
    elif how == "anybody may write it":
        path.chmod(0o666)
    elif how == "anybody may put it there":
        path.parent.chmod(0o777)


DAMAGES = (
    "cut", "longer", "changed", "another file", "empty", "another step", "anybody may write it",
    "anybody may put it there",
)  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_what_is_not_whole_or_may_be_a_strangers_is_compiled(functions, tmp_path, how, caplog):
    key = ADMIT
    first = executables(functions, tmp_path)
    first.get(key), first.get(SCORE)
    damaged(tmp_path / saved_in(tmp_path).name / f"{ADMIT}.executable", how)
    with caplog.at_level(logging.WARNING):
        again = executables(functions, tmp_path)
        again.get(key)
    (record,) = [r for r in caplog.records if "executables cannot be" in r.message]
    assert "\n" not in record.message and again.compiles.seconds > 0


def test_a_step_that_takes_other_arrays_is_another(functions, tmp_path, caplog):
    executables(functions, tmp_path).get(ADMIT)
    arguments = functions.step(ADMIT)[1]
    assert saved_in(tmp_path).load(ADMIT, arguments) is not None
    longer = jax.tree.map(lambda a: jax.ShapeDtypeStruct((*a.shape, 2), a.dtype), arguments)
    assert saved_in(tmp_path).load(ADMIT, longer) is None
    assert "takes other arrays" in caplog.text


def test_what_depends_on_a_callers_functions_is_not_saved(functions):
    keys = Key("head", 2, SAMPLED | {"processors"}), Key("put", 0, frozenset({"processors"})), Key("head", 2, SAMPLED)
    named = [functions.features.named(key.variant) for key in keys]
    assert [all(feature.is_saved for feature in features) for features in named] == [False, False, True]


def test_what_is_saved_in_a_new_folder_is_loaded_whatever_the_umask(functions, tmp_path):
    before = os.umask(0o002)
    try:
        executables(functions, tmp_path / "new" / "executables").get(ADMIT)
    finally:
        os.umask(before)
    again = executables(functions, tmp_path / "new" / "executables")
    again.get(ADMIT)
    assert again.compiles.seconds == 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_said_once(functions, tmp_path, caplog):
    tmp_path.chmod(0o500)
    check_said_once(functions, tmp_path, caplog)


def test_a_place_that_is_no_folder_is_said_once(functions, tmp_path, caplog):
    place = tmp_path / "file"
    place.write_text("")
    check_said_once(functions, place, caplog)


def check_said_once(functions: StepFunctions, place: Path, caplog: Any) -> None:
    several = executables(functions, place)
    with caplog.at_level(logging.WARNING):
        several.get(ADMIT), several.get(ADJUST)
    said = [r.message for r in caplog.records if "cannot be saved" in r.message]
    assert len(said) == 1 and "\n" not in said[0]


def test_engines_that_start_together_may_let_the_same_sets_go(functions, tmp_path, caplog):
    """As the processes of a group do, whose stages and places make sets of their own."""
    compiled = executables(functions, tmp_path / "other").get(ADMIT)
    together = threading.Barrier(4)

    def save(number: int) -> None:
        for round_ in range(3 * KEPT_SETS):
            together.wait()
            saved_in(tmp_path, f"{number} {round_}").save(ADMIT, compiled)  # type: ignore[arg-type]

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(4)))
    assert not caplog.records


def test_the_longest_unused_sets_go(functions, tmp_path):
    compiled = executables(functions, tmp_path / "other").get(ADMIT)
    for number in range(KEPT_SETS + 2):
        one = saved_in(tmp_path, str(number))
        one.save(ADMIT, compiled)  # type: ignore[arg-type]
        os.utime(tmp_path / one.name, (number, number))
        if number == 2:
            kept = one
        saved_in(tmp_path, "2").touch() if number > 2 else None
    assert (tmp_path / kept.name).exists()
    assert not (tmp_path / saved_in(tmp_path, "0").name).exists()
    assert len([p for p in tmp_path.iterdir() if p.name != "other"]) <= KEPT_SETS


def test_a_compile_cache_keeps_what_was_used_last_within_its_bytes(tmp_path):
    """Sets of executables and the files of XLA, which were last read after they were written."""
    written = {
        "old-cache": 1,
        "read-cache": 2,
        "new-cache": 4,
        f"{SETS}/old/a.executable": 3,
        f"{SETS}/new/a.executable": 5,
    }
    for name, second in written.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (second, second))
        os.utime((tmp_path / name).parent, (second, second))
    os.utime(tmp_path / "read-cache", (6, 2))
    (tmp_path / "other").write_bytes(bytes(1000))
    make_room(tmp_path, 500)
    assert all((tmp_path / name).exists() for name in written)
    make_room(tmp_path, 320)
    kept = {name for name in written if (tmp_path / name).exists()}
    assert kept == {"read-cache", "new-cache", f"{SETS}/new/a.executable"}
    make_room(tmp_path, 150)
    assert sorted(path.name for path in tmp_path.iterdir()) == [SETS, "other", "read-cache"]
    assert not (tmp_path / SETS / "new").exists()


def test_room_is_made_after_a_start_and_not_in_folders_of_others(model, tmp_path, monkeypatch):
    def started(enabled):
        old = tmp_path / "jit_old-cache"
        old.write_bytes(bytes(1000))
        monkeypatch.setattr(compat, "compile_cache", lambda: enabled)
        fields = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_memory": 2**20, "enforce_eager": True}
        with LLM(model, **fields, skip_tokenizer_init=True, compile_cache_dir=tmp_path, compile_cache_max=500):
            while thread := next((one for one in threading.enumerate() if one.name == "make room"), None):
                thread.join()
        return old

    assert not started(tmp_path).exists()
    assert started(None).exists(), "the program around has a cache of its own"


CHANGES = {
    "dtype": {"dtype": "bfloat16", "cpu_kernels": "off"},
    "sequences": {"max_num_seqs": 3},
    "tokens": {"max_num_batched_tokens": 32},
    "pages": {"kv_cache_memory": 2**19},
    "page size": {"block_size": 8},
    "context": {"max_model_len": 100},
    "steps": {"decode_steps": 2},
    "pages of eight bits": {"kv_cache_dtype": "int8"},
    "weights of eight bits": {"isq": "int8"},
}


@pytest.mark.parametrize("what", CHANGES)
def test_each_setting_that_a_step_depends_on_makes_another_set(model, what):
    before, after = blueprint_of(model), blueprint_of(model, **CHANGES[what])
    mesh = build_meshes(1)[0]
    assert step_manifest(before, mesh) != step_manifest(after, mesh)
    assert step_manifest(before, mesh) == step_manifest(blueprint_of(model), mesh)


def test_what_surrounds_the_steps_makes_another_set(model, monkeypatch):
    blueprint, mesh = blueprint_of(model), build_meshes(1)[0]
    plain = step_manifest(blueprint, mesh)
    config = blueprint.spec.config
    other = replace(blueprint, spec=replace(blueprint.spec, config=replace(config, norm_eps=0.1)))
    assert step_manifest(other, mesh) != plain
    monkeypatch.setattr("jaxllm.engine.start.prepared.sources_digest", lambda: "others")
    assert step_manifest(blueprint, mesh) != plain
    monkeypatch.undo()
    monkeypatch.setenv("NPROC", "77")
    assert step_manifest(blueprint, mesh) != plain


def test_what_differs_from_the_nearest_set_is_said(functions, tmp_path):
    here = SavedExecutables(None, {"model": "m", "jax": "2", "sizes": "8"}, jax.devices()[:1])
    assert here.difference(tmp_path) == "there are none in it"
    compiled = executables(functions, tmp_path / "other").get(ADMIT)
    for manifest in ({"model": "m", "jax": "1", "sizes": "8"}, {"model": "o", "jax": "1", "sizes": "8"}):
        SavedExecutables(tmp_path, manifest, jax.devices()[:1]).save(ADMIT, compiled)  # type: ignore[arg-type]
    assert here.difference(tmp_path) == "jax is '1' there and '2' here"
    same = SavedExecutables(None, {"model": "m", "jax": "1", "sizes": "8"}, jax.devices()[:1])
    assert same.difference(tmp_path) is None
