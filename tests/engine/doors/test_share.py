"""A process among several keeps to its part of the machine, or says in one line why it cannot."""

from __future__ import annotations

import os

import pytest

from jaxllm import machine
from jaxllm.config import ModelConfig, make_config
from jaxllm.engine.doors.replicas import start_client
from jaxllm.engine.doors.share import Share
from jaxllm.errors import ConfigError
from jaxllm.sharding import nvidia
from jaxllm.sharding.nvidia import Card


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four of them, for processes that may use JAX's plugin."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    monkeypatch.setattr(nvidia, "installed_cuda", lambda: 13)
    monkeypatch.setattr(nvidia, "cards", lambda: [Card("H100", 80, 80)] * 4)


@pytest.mark.parametrize(
    ("share", "each", "visible"),
    [(Share(0, 4), 1, "4"), (Share(3, 4), 1, "7"), (Share(1, 2), 2, "6,7"), (Share(0, 1), 4, "4,5,6,7")],
)
def test_each_sees_gpus_of_its_own(gpus: None, share: Share, each: int, visible: str) -> None:
    share.take(each)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_there_must_be_enough_gpus(gpus: None) -> None:
    message = "tensor_parallel_size is 8, and each process has 1 of the GPUs: there are 4, and it takes 8"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        Share(7, 8, "tensor_parallel_size").take(1)


def test_without_gpus_each_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    taken: list[list[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 5, 6}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(cores), raising=False)
    monkeypatch.setattr(machine, "_sharers", 1)
    for number in range(2):
        Share(number, 2).take(1)
    assert taken == [[0, 1], [2, 5, 6]]
    with pytest.raises(ConfigError, match=r"^data_parallel_size is 6: each process needs a core of its own"):
        Share(0, 6).take(1)


def test_a_core_s_two_threads_go_to_one_process_where_there_are_cores_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    taken: list[list[int]] = []
    monkeypatch.setattr(machine, "_siblings", lambda root, number: f"{number % 4},{number % 4 + 4}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(cores), raising=False)
    monkeypatch.setattr(machine, "_sharers", 1)
    for number in range(2):
        Share(number, 2).take(1)
    Share(4, 5).take(1)
    assert taken == [[0, 1, 4, 5], [2, 3, 6, 7], [3, 7]]


def test_threads_are_shared_out() -> None:
    assert [[Share(n, count).threads(8) for n in range(count)] for count in (1, 2, 3)] == [[8], [4, 4], [2, 3, 3]]
    assert Share(0, 2).threads(None) is None
    make_config(ModelConfig, threads=2, data_parallel_size=2, engine_process=True)
    with pytest.raises(ConfigError, match=r"^threads is 1, which 2 processes would share; accepted are 2 or more$"):
        make_config(ModelConfig, threads=1, data_parallel_size=2, engine_process=True)


@pytest.mark.parametrize("engines", [1, 2])
def test_a_process_is_told_its_threads(engines: int) -> None:
    """An engine's own process, which has its part of the cores where there are two, refuses more threads than those."""
    cores = machine.allowed_cores()
    if cores % engines:
        pytest.skip("the cores cannot be halved")
    config = make_config(
        ModelConfig,
        threads=engines * (cores + 1),
        engine_process=True,
        data_parallel_size=engines,
        model="smollm2-135m",
    )
    message = f"^threads is {cores + 1} in a process that may use {cores // engines} cores; accepted are 1 to "
    with pytest.raises(ConfigError, match=message):
        start_client(config)


def test_other_devices_are_one_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(ConfigError, match=r"^data_parallel_size is 2, and JAX_PLATFORMS is tpu: "):
        Share(0, 2).take(1)
