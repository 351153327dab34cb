"""Engine processes without a model, for what goes on between processes: quick to start, and able to misbehave."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from jaxllm.config import EngineConfig
from jaxllm.engine.doors.engine_process import FrontDoor, Started, run_loop
from jaxllm.engine.messages import EngineInfo, EngineRequest, EngineStats, TokenDelta

TOKEN, TEXT = 33, "!"
WAITS = 66
"""A prompt of this token waits for a place for good."""
STEP_SECONDS = 0.02
LONG_SECONDS = 4.0
HELD_SECONDS = 1


def info(kv_cache_memory: int | None = None) -> EngineInfo:
    return EngineInfo(
        model_name="stand-in", vocab_size=300, max_model_len=2**20, eos_token_ids=[257], num_pages=100, page_size=16,
        max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory=kv_cache_memory,
    )  # fmt: skip


class Core:
    """Every request gets a token a step; the first step of all takes LONG_SECONDS where it is to be `slow`."""

    def __init__(self, slow: bool = False) -> None:
        self._left: dict[str, int] = {}
        self._slow = slow
        self.on_begin: Callable[[list[str]], None] = lambda request_ids: None

    def when_prepared(self, wake: Callable[[], None]) -> None:
        pass

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    @property
    def load(self) -> tuple[int, int]:
        return len(self._left), 0

    def add(self, request: EngineRequest) -> None:
        if request.prompt_token_ids != [WAITS]:
            self.on_begin([request.request_id])
            self._left[request.request_id] = request.sampling_params.max_tokens or 10**9

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    def turn(self) -> list[TokenDelta]:
        if self._slow:
            time.sleep(LONG_SECONDS)  # as XLA compiles: other threads may run
            ctypes.PyDLL(None).sleep(HELD_SECONDS)  # as other C code does, which keeps Python from running
            self._slow = False
        time.sleep(STEP_SECONDS)
        self._left = {name: left - 1 for name, left in self._left.items()}
        deltas = [
            TokenDelta(request_id=name, token_ids=[TOKEN], text=TEXT, finish_reason=None if left else "length")
            for name, left in self._left.items()
        ]
        self._left = {name: left for name, left in self._left.items() if left}
        return deltas

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._left), ready=True)


def paced(pipe: Connection, config: EngineConfig, log: Any, *_: object) -> None:
    front_door = FrontDoor(pipe)
    front_door.send(Started(info(config.kv_cache_memory)))
    run_loop(front_door, Core())  # type: ignore[arg-type]


def slow(pipe: Connection, config: EngineConfig, log: Any, *_: object) -> None:
    front_door = FrontDoor(pipe)
    front_door.send(Started(info()))
    run_loop(front_door, Core(slow=True))  # type: ignore[arg-type]


def never_ready(pipe: Connection, config: EngineConfig, log: Any, *_: object) -> None:
    FrontDoor(pipe)
    time.sleep(600)
