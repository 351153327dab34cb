"""A real server's monitor port: its engine's devices, its steps and its threads."""

from __future__ import annotations

import gzip
import io
import json
import threading
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.looking.decode import Profile, decode
from tests.serving.conftest import wait_for
from tests.serving.mixed_requests import SETTINGS, write_model
from tests.serving.real_server import served
from tests.sharding.ports import free_port

pytestmark = pytest.mark.programs


def test_an_engine_tells_of_itself_while_it_works(tmp_path: Path) -> None:
    port = free_port()
    model = write_model(tmp_path / "model")
    with served(str(model), **SETTINGS, monitor_port=port, data_dir=str(tmp_path), enforce_eager=True) as url:
        monitor = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, params={"process": "engine/tiny"})
        assert httpx.get(f"http://127.0.0.1:{port}/debug/").json()["processes"] == ["api", "engine/tiny"]
        done = threading.Event()

        def keep_busy() -> None:
            while not done.is_set():
                asked = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
                httpx.post(f"{url}/v1/completions", json=asked, timeout=120)

        busy = threading.Thread(target=keep_busy)
        busy.start()
        try:
            profiles: list[Profile] = []

            def sees_steps() -> bool:
                profiles.append(decode(monitor.get("/debug/pprof/profile", params={"seconds": 0.5}).content))
                return profiles[-1].total("Runner.", "wall/nanoseconds") > 0

            wait_for(sees_steps, 120)
            assert profiles[-1].total("run_loop", "cpu/nanoseconds") > 0
            heap = decode(monitor.get("/debug/pprof/heap").content)
            weights = sum(value for sample in heap.samples for kind, value in sample.values.items() if "bytes" in kind)
            assert weights > 300 * 2**10, "they take that; pages are not counted while a step has them"

            def traces_steps() -> bool:
                trace = zipfile.ZipFile(io.BytesIO(monitor.get("/debug/trace", params={"seconds": 0.5}).content))
                names = {name.rpartition(".")[2] if "xplane" in name else name for name in trace.namelist()}
                assert {"pb", "perfetto_trace.json.gz"} <= names
                return len(json.loads(gzip.decompress(trace.read("perfetto_trace.json.gz")))["traceEvents"]) > 100

            wait_for(traces_steps, 120)  # on a busy machine there may be no whole step in half a second
            assert "in run_loop" in monitor.get("/debug/stacks").text
        finally:
            done.set()
            busy.join()
        assert "Task " in monitor.get("/debug/stacks", params={"process": "api"}).text
        refused = monitor.get("/debug/trace", params={"process": "api"})
        assert refused.status_code == 400, "the server itself does without JAX"
