"""The engine process of serving_cpu.py: a stand-in that gives every stream a token at each of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

MODEL = "smollm2-135m"


class PacedCore:
    """Gives each request one token of a fixed text at every step, `steps_per_second` of them."""

    TEXT = ("", "The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog.")

    def __init__(self, steps_per_second: float):
        self._requests: dict[str, Any] = {}
        self._pace = 1 / steps_per_second
        self._next = time.perf_counter()

    def when_prepared(self, wake: Callable[[], None]) -> None:
        pass

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def load(self) -> tuple[int, int]:
        return len(self._requests), 0

    def add(self, message: Any) -> None:
        self._requests[message.request_id] = [0, message.sampling_params.max_tokens]

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._requests.pop(request_id, None)

    def turn(self) -> list[Any]:
        from jaxllm.engine.messages import TokenDelta

        self._next = max(self._next + self._pace, time.perf_counter() - self._pace)
        time.sleep(max(self._next - time.perf_counter(), 0))
        deltas = []
        for request_id, progress in list(self._requests.items()):
            progress[0] += 1
            done = progress[0] >= progress[1]
            text = " " + self.TEXT[progress[0] % len(self.TEXT)]
            finish = "length" if done else None
            deltas.append(TokenDelta(request_id=request_id, token_ids=[1000], text=text, finish_reason=finish))
            if done:
                del self._requests[request_id]
        return deltas

    def stats(self) -> Any:
        from jaxllm.engine.messages import EngineStats

        return EngineStats(num_running=len(self._requests), ready=True)


def paced_engine(pipe: Connection, config: Any, log: Any, *_: object) -> None:
    """The process of the stand-in; the pace travels in config.seed."""
    from jaxllm.engine.doors.engine_process import FrontDoor, Started, run_loop
    from jaxllm.engine.messages import EngineInfo

    info = EngineInfo(
        model_name=MODEL, vocab_size=49152, max_model_len=8192, eos_token_ids=[2], num_pages=1, page_size=16,
        max_num_seqs=256, max_num_batched_tokens=512,
    )  # fmt: skip
    front_door = FrontDoor(pipe)
    front_door.send(Started(info))
    run_loop(front_door, PacedCore(config.seed))  # type: ignore[arg-type]
