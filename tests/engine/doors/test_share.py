"""A process among several keeps to its part of the machine, or says in one line why it cannot."""

from __future__ import annotations

import os

import pytest

from jaxllm import machine
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


def test_other_devices_are_one_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    with pytest.raises(ConfigError, match=r"^data_parallel_size is 2, and JAX_PLATFORMS is tpu: "):
        Share(0, 2).take(1)
