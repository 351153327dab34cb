"""A server with a data directory that outlives it, for batches."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import uvicorn
from fastapi import FastAPI

from jaxllm.config import ServeConfig
from jaxllm.serving.http.listening import bind
from tests.serving.conftest import wait_for
from tests.serving.fake_engine import FakeEngine, app_of

CHAT = "/v1/chat/completions"
FINAL = ("completed", "failed", "expired", "cancelled")


class Running:
    """A server of an engine and a data directory, until it is stopped."""

    def __init__(
        self, engine: FakeEngine, data_dir: Path, others: Mapping[str, FakeEngine] | None = None, **settings: Any
    ):
        config = ServeConfig(model="fake", port=0, data_dir=data_dir, **settings)
        self.engine = engine
        self.begin(app_of(config, engine, others), config.api_key)

    def begin(self, app: FastAPI, api_key: str | None = None) -> None:
        """Serve the application in a thread."""
        listener = bind("127.0.0.1", 0)
        self.app = app
        self.server = uvicorn.Server(
            uvicorn.Config(self.app, http="httptools", log_config=None, timeout_graceful_shutdown=1)
        )
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]}, daemon=True)
        self.thread.start()
        wait_for(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        key = (api_key or "none").split(",")[0]
        self.client = openai.OpenAI(base_url=self.url, api_key=key, max_retries=0, timeout=20)

    def submit(self, lines: list[Any], endpoint: Any = CHAT, **fields: Any) -> str:
        content = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        file = self.client.files.create(file=("in.jsonl", content), purpose="batch")
        fields = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"} | fields
        return self.client.batches.create(**fields).id

    def finished(self, batch_id: str, seconds: float = 15) -> Any:
        wait_for(lambda: self.client.batches.retrieve(batch_id).status in FINAL, seconds)
        return self.client.batches.retrieve(batch_id)

    def results(self, file_id: str | None) -> dict[str, Any]:
        assert file_id is not None
        text = self.client.files.content(file_id).text
        assert text.endswith("\n")
        results = [json.loads(line) for line in text.splitlines()]
        by_id = {result["custom_id"]: result for result in results}
        assert len(by_id) == len(results)
        return by_id

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive() and not self.server.lifespan.shutdown_failed
        self.client.close()


def chat(number: int, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": f"Question {number}"}]} | fields
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


def questions(engine: FakeEngine) -> list[str]:
    """What the engine was asked, by the number in each prompt."""
    prompts = [bytes(token for token in seen[0] if token < 256).decode() for seen in engine.seen]
    return [prompt.split("Question ")[1].split("[")[0] for prompt in prompts]
