"""LLM.chat asks a model for the same as the server does, and finds the same in what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jaxllm import LLM, InvalidRequestError, SamplingParams
from jaxllm.engine.messages import EngineRequest
from jaxllm.requests.structured_outputs import StructuredOutputs
from tests.serving.conftest import make_client  # noqa: F401
from tests.serving.fake_engine import ByteTokenizer, FakeEngine
from tests.serving.openai.test_tools import CALL, NAMED, TEMPLATE, TOOL, TWO_CALLS

THINKS = TEMPLATE + "{% if enable_thinking is not false %}<think>\n{% else %}<think></think>{% endif %}"
KNOWS_NO_TOOLS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
STRICT: dict[str, Any] = {"type": "function", "function": TOOL["function"] | {"strict": True}}  # type: ignore[operator]
HELLO: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
]
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
HISTORY = [
    *HELLO,
    {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "12 degrees"},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}

ASKED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "reasoning": (THINKS, "Hm.\n</think>\n\nIt is 12.", {}),
    "no reasoning": (THINKS, "It is 12.", {"chat_template_kwargs": {"enable_thinking": False}}),
    "a call": (TEMPLATE, f"Let me see.\n{CALL}", {"tools": [TOOL]}),
    "reasoning and calls": (THINKS, f"Hm.</think>\n{TWO_CALLS}", {"tools": [TOOL]}),
    "one call of two": (THINKS, f"Hm.</think>\n{TWO_CALLS}", {"tools": [TOOL], "parallel_tool_calls": False}),
    "a strict tool": (THINKS, f"Hm.</think>\n{CALL}", {"tools": [STRICT]}),
    "a call that must be": (THINKS, f"Hm.</think>\n{CALL}", {"tools": [TOOL], "tool_choice": "required"}),
    "a call by name": (TEMPLATE, CALL, {"tools": [TOOL], "tool_choice": NAMED}),
    "no call": (TEMPLATE, CALL, {"tools": [TOOL], "tool_choice": "none"}),
    "a call of no tool": (TEMPLATE, CALL.replace("weather", "other"), {"tools": [TOOL]}),
    "a call cut short": (TEMPLATE, CALL, {"tools": [TOOL], "max_tokens": 40}),
    "a call's result": (TEMPLATE, "12.", {"messages": HISTORY, "tools": [TOOL]}),
    "tools as text": (KNOWS_NO_TOOLS, CALL, {"messages": HISTORY, "tools": [TOOL]}),
    "a schema": (THINKS, 'Hm.</think>{"a": 1}', {"schema": SCHEMA}),
    "a budget": (THINKS, "Hm.</think>12.", {"max_thinking_tokens": 20}),
}


def notebook(engine: FakeEngine) -> LLM:
    llm = LLM.__new__(LLM)
    llm._streams, llm.tokenizer = engine._streams, engine.tokenizer
    return llm


@pytest.fixture
def asks(
    make_client: Callable[..., TestClient],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[list[Any], list[Any]]]:
    def ask(template: str, reply: str, asked: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """The answers of LLM.chat, of a whole response and of a stream, and what the engine was asked for each."""
        engine = FakeEngine(reply=reply)
        engine.tokenizer = ByteTokenizer(template)
        engine.info.max_model_len = 4096
        asked = {"messages": HELLO, "max_tokens": 500} | asked
        requests: list[EngineRequest] = []
        add = engine._streams.client.add

        def noted(request: EngineRequest) -> None:
            requests.append(request)
            add(request)

        monkeypatch.setattr(engine._streams.client, "add", noted)
        client = make_client(engine)
        answers = [_of_llm(notebook(engine), dict(asked)), _whole(client, dict(asked)), _streamed(client, dict(asked))]
        return answers, [(request.prompt_token_ids, request.sampling_params) for request in requests]

    return ask


def _of_llm(llm: LLM, asked: dict[str, Any]) -> Any:
    schema = asked.pop("schema", None)
    outputs = None if schema is None else StructuredOutputs(json=json.dumps(schema))
    numbers = {name: asked.pop(name) for name in ("max_tokens", "max_thinking_tokens") if name in asked}
    params = replace(llm.get_default_sampling_params(), structured_outputs=outputs, **numbers)
    (output,) = llm.chat(asked.pop("messages"), params, False, separate_reasoning=True, **asked)
    (choice,) = output.outputs
    calls = [(call.name, call.arguments) for call in choice.tool_calls]
    return choice.text, choice.reasoning, calls, choice.finish_reason


def _body(asked: dict[str, Any]) -> dict[str, Any]:
    schema = asked.pop("schema", None)
    formed = {} if schema is None else {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    return asked | formed


def _whole(client: TestClient, asked: dict[str, Any]) -> Any:
    response = client.post("/v1/chat/completions", json=_body(asked))
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"] or "", message.get("reasoning"), calls, choice["finish_reason"]


def _streamed(client: TestClient, asked: dict[str, Any]) -> Any:
    text, reasoning, calls, reason = "", "", [], None
    with client.stream("POST", "/v1/chat/completions", json=_body(asked) | {"stream": True}) as response:
        for line in filter(None, response.iter_lines()):
            data = line.removeprefix("data: ")
            for choice in json.loads(data)["choices"] if data != "[DONE]" else ():
                delta, reason = choice["delta"], choice["finish_reason"] or reason
                text += delta.get("content") or ""
                reasoning += delta.get("reasoning") or ""
                for call in delta.get("tool_calls") or ():
                    if name := call["function"].get("name"):
                        calls.append([name, ""])
                    calls[-1][1] += call["function"]["arguments"]
    return text, reasoning or None, [tuple(call) for call in calls], reason


@pytest.mark.parametrize("name", ASKED)
def test_it_asks_and_answers_as_the_server_does(asks: Callable[..., Any], name: str) -> None:
    (mine, whole, streamed), (first, second, third) = asks(*ASKED[name])
    assert mine == whole == streamed
    assert first == second == third


def test_what_was_asked_for_comes_about(asks: Callable[..., Any]) -> None:
    (found, *_), ((_, params), *_) = asks(*ASKED["a call that must be"])
    assert found == ("", "Hm.", [("weather", '{"city": "Paris"}')], "tool_calls")
    assert params.structured_outputs.after == "</think>"


def test_without_tools_a_text_is_what_the_model_wrote() -> None:
    engine = FakeEngine(reply=f"Hm.</think>{CALL}")
    engine.tokenizer = ByteTokenizer(THINKS)
    (output,) = notebook(engine).chat(HELLO, SamplingParams(max_tokens=500), False)
    (choice,) = output.outputs
    hidden = CALL.replace("<tool_call>", "").replace("</tool_call>", "")  # special tokens
    assert choice.text == f"Hm.{hidden}" and choice.reasoning is None and not choice.tool_calls


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"tools": [{"name": "f"}]}, r'^tools\[0\] is \{"name": "f"\}; it must be \{"type": "function"'),
        ({"tools": [TOOL, TOOL]}, "^tools has two functions named 'weather'"),
        ({"tool_choice": "required"}, "^tool_choice is 'required'; it must be"),
        (
            {"tools": [TOOL], "tool_choice": "weather"},
            "^tool_choice is 'weather'; .* the tools are weather$",
        ),
    ],
)
def test_what_it_refuses(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        notebook(FakeEngine()).chat(HELLO, SamplingParams(), False, **asked)


def test_messages_of_a_template_of_its_own_are_given_as_they_are() -> None:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer("{% for m in messages %}<{{ m.role }}>{{ m.mood }}{{ m.content }}{% endfor %}")
    said = [{"role": "narrator", "mood": "sad", "content": "Rain."}, {"role": "tool", "content": "12"}]
    (output,) = notebook(engine).chat(said, SamplingParams(), False)
    assert output.prompt == "<narrator>sadRain.<tool>12"
