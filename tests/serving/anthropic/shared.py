"""What the tests of /v1/messages share: a tool, and an engine that says what it is told."""

from __future__ import annotations

from typing import Any

from jaxllm.engine.messages import TokenDelta
from tests.serving.fake_engine import ByteTokenizer, FakeEngine

CONTEXT = 4096


HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


WEATHER: Any = {"name": "get_weather", "description": "Weather now", "input_schema": SCHEMA}


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


TEMPLATE = (
    "{% if tools %}(tools={{ tools | tojson }}){% endif %}"
    "{% if enable_thinking is defined %}(enable_thinking={{ enable_thinking }}){% endif %}"
    "{% if thinking_budget is defined %}(thinking_budget={{ thinking_budget }}){% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


FORMATS = {"tool_call_parser": "hermes", "reasoning_parser": "think"}


class ScriptedEngine(FakeEngine):
    """Says `reply`, and ends with `stop_reason`, or with finish_reason "abort"."""

    stop_reason: str | None = None
    aborts = False

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.info.max_model_len = CONTEXT
        self.tokenizer = ByteTokenizer(TEMPLATE)

    def _delta(self, *args: Any) -> TokenDelta:
        delta = super()._delta(*args)
        if delta.finish_reason == "stop":
            delta.stop_reason = self.stop_reason
            delta.finish_reason = "abort" if self.aborts else "stop"
        return delta

    @property
    def last_prompt(self) -> str:
        return ByteTokenizer().decode(self.seen[-1][0])

    @property
    def last_params(self) -> Any:
        return self.seen[-1][1]
