"""What an engine will take is known before it touches a device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxllm import EngineConfig, compat
from jaxllm.engine.start import foresight
from jaxllm.engine.start.blueprint import plan_engine
from jaxllm.engine.start.foresight import Foreseen, foresee
from jaxllm.engine.start.plan import PROCESS_BYTES
from jaxllm.engine.start.platform import Platform
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.errors import ConfigError
from jaxllm.sharding import devices, nvidia
from tests.reference.tiny import write_checkpoint

pytestmark = pytest.mark.programs

GIB = 2**30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama_gqa", tmp_path_factory.mktemp("tiny"))


def foreseen(directory: Path, budget: int | None, **fields: object) -> Foreseen:
    config = EngineConfig(model=str(directory), dtype="float32", **fields)
    checkpoint = open_model(config, directory)
    try:
        return foresee(config, checkpoint, budget)
    finally:
        checkpoint.close()


def test_an_engine_within_a_budget_is_built_as_it_was_foreseen(directory: Path) -> None:
    config, nbytes = foreseen(directory, GIB)
    assert nbytes is not None and PROCESS_BYTES < nbytes <= GIB
    for free in (GIB // 8, 64 * GIB):  # whatever is free by then
        plan = plan_engine(config, Platform("cpu", 1, None, free))
        assert nbytes == PROCESS_BYTES + plan.planned_bytes


def test_a_larger_budget_gives_a_larger_cache(directory: Path) -> None:
    less, more = (foreseen(directory, PROCESS_BYTES + room, max_num_seqs=4096).nbytes for room in (2**26, 2**28))
    assert less is not None and more is not None and less < more


def test_what_never_fits_is_refused_with_the_budget(directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs .* of KV cache.* model_memory is 1 GiB: raise it"):
        foreseen(directory, GIB, kv_cache_memory=2 * GIB, max_num_seqs=4096)
    with pytest.raises(ConfigError, match=r"holds no page .*; model_memory is 100 MiB"):
        foreseen(directory, 100 * 2**20)


def test_without_a_budget_only_the_machine_is_the_limit(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, nbytes = foreseen(directory, None)
    assert config.kv_cache_memory is None and nbytes is not None and nbytes > PROCESS_BYTES
    small = Platform("cpu", 1, None, GIB, host_memory=GIB)
    monkeypatch.setattr(foresight, "expected", lambda: small)
    with pytest.raises(ConfigError, match="this process may have 1 GiB"):
        foreseen(directory, None, kv_cache_memory=4 * GIB, max_num_seqs=4096)


def test_a_gpus_engine_takes_the_share_that_it_needs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "expected_platform", lambda: "gpu")
    monkeypatch.setattr(nvidia, "cards", lambda: [nvidia.Card("NVIDIA H100 80GB HBM3", 80 * GIB, GIB)])
    fields = {"attention_backend": "reference", "max_num_seqs": 4096}
    config, nbytes = foreseen(directory, 20 * GIB, kv_cache_memory=8 * GIB, **fields)
    spare = int(80 * GIB * compat.SPARE_SHARE)
    plan = plan_engine(config, Platform("gpu", 1, 76 * GIB, 64 * GIB, 80 * GIB))
    assert nbytes == spare + plan.planned_bytes <= 20 * GIB
    assert 0 <= config.gpu_memory_utilization * 80 * GIB - plan.planned_bytes <= 0.001 * 80 * GIB
    all_of_it = foreseen(directory, 20 * GIB, **fields).nbytes  # without a word of its own it takes what there is
    assert all_of_it is not None and all_of_it <= 20 * GIB


def test_where_only_the_devices_could_tell_nothing_is_foreseen(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foresight, "expected_platform", lambda: None)
    config, nbytes = foreseen(directory, None)
    assert nbytes is None and config.kv_cache_memory is None
    with pytest.raises(ConfigError, match="model_memory is 1 GiB: it is for CPUs and NVIDIA GPUs"):
        foreseen(directory, GIB)


@pytest.mark.parametrize(
    ("chosen", "gpu", "others", "expected"),
    [
        ("", False, False, "cpu"), ("", True, False, "gpu"), ("", True, True, "gpu"), ("", False, True, None),
        ("cpu", True, False, "cpu"), ("cuda,cpu", True, False, "gpu"), ("tpu", False, True, None),
        ("cuda", False, False, None),
    ],
)  # fmt: skip
def test_the_platform_is_told_without_starting_it(
    monkeypatch: pytest.MonkeyPatch, chosen: str, gpu: bool, others: bool, expected: str | None
) -> None:
    monkeypatch.setattr(compat, "chosen_platforms", lambda: chosen)
    monkeypatch.setattr(compat, "other_accelerators", lambda: others)
    monkeypatch.setattr(devices, "nvidia_gpu_is_here", lambda: gpu)
    monkeypatch.setattr(nvidia, "installed_cuda", lambda: 13)
    monkeypatch.setattr(nvidia, "hidden", lambda: False)
    assert devices.expected_platform() == expected


def test_no_device_is_touched(directory: Path) -> None:
    program = f"""
from pathlib import Path
from jaxllm import EngineConfig, compat
from jaxllm.engine.start.tokenizer import open_model
from jaxllm.engine.start.foresight import foresee
config = EngineConfig(model={str(directory)!r})
print(foresee(config, open_model(config, Path(config.model)), 2**30).nbytes > 2**29, compat.backends_run())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
