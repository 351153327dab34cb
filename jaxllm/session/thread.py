"""An event loop on a thread of its own, for what must outlive its callers' loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from jaxllm.errors import JaxLLMError

T = TypeVar("T")


class LoopThread:
    """Runs coroutines of callers in other threads, or on other loops; it begins with the first."""

    def __init__(self, name: str):
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin it; cancelling the future cancels it. Raises JaxLLMError once this is closed."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._started())
        except JaxLLMError:
            work.close()
            raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it while the calling thread waits; what interrupts that cancels it."""
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it while the calling task waits; cancelling that cancels it."""
        return await asyncio.wrap_future(self.submit(work))

    async def iterate(self, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """Items that come into being there, here; whoever stops reading ends them."""
        here = asyncio.get_running_loop()
        arrived: asyncio.Queue[T | None] = asyncio.Queue()

        def tell(item: T | None) -> None:
            here.call_soon_threadsafe(arrived.put_nowait, item)

        async def read() -> None:
            try:
                async for item in items:
                    tell(item)
            finally:
                tell(None)

        reading = asyncio.wrap_future(self.submit(read()))
        try:
            while (item := await arrived.get()) is not None:
                yield item
            await reading
        finally:
            reading.cancel()

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Run `last`, if anything has run, and end the thread: nothing more can be submitted."""
        with self._lock:
            self._closed = True
            loop = self._loop
        if loop is None:
            last.close()
            return
        try:
            asyncio.run_coroutine_threadsafe(last, loop).result()
        finally:
            loop.call_soon_threadsafe(loop.stop)

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise JaxLLMError("the session is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True).start()
            return self._loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()
    loop.close()
