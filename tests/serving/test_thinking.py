"""Thinking budgets over HTTP: what the engine is asked for, and what SDKs get from a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi.testclient import TestClient

from jaxllm.chat.conversation import EFFORT_BUDGETS
from jaxllm.requests.sampling import SamplingParams, ThinkingMarkers
from jaxllm.text.reasoning import CHANNELS, REASONING_FORMATS, ReasoningFormat
from tests.serving.fake_engine import ByteTokenizer, FakeEngine
from tests.serving.mixed_requests import write_model
from tests.serving.real_server import served
from tests.support.covers import covers

HELLO = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 60},
    "/v1/completions": {"prompt": "Hi"},
}
MODEL = "tiny"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
OPENS = TEMPLATE + "<think>\n"
KNOWS_EFFORT = TEMPLATE + "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}"
SWITCH = TEMPLATE + "<think>\n{% if enable_thinking is false %}</think>\n{% endif %}"


def asked(client: TestClient, engine: FakeEngine, path: str, **fields: Any) -> SamplingParams:
    response = client.post(path, json=BODIES[path] | fields)
    assert response.status_code == 200, response.text
    return engine.seen[-1][1]


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine()
    engine.tokenizer = ByteTokenizer(TEMPLATE)
    return engine


@pytest.fixture
def client(make_client: Any, engine: FakeEngine) -> TestClient:
    return make_client(engine, reasoning_parser="think")


@covers("SamplingFields", "max_thinking_tokens")
@covers("SamplingFields", "thinking_token_budget")
@covers("Thinking", "budget_tokens")
@pytest.mark.parametrize(
    ("path", "fields", "budget"),
    [
        ("/v1/chat/completions", {}, None),
        ("/v1/chat/completions", {"max_thinking_tokens": 7}, 7),
        ("/v1/chat/completions", {"max_thinking_tokens": 0}, 0),
        ("/v1/chat/completions", {"thinking_token_budget": 7}, 7),
        ("/v1/chat/completions", {"thinking_token_budget": 7, "max_thinking_tokens": 7}, 7),
        ("/v1/chat/completions", {"thinking_token_budget": -1}, None),
        ("/v1/responses", {"thinking_token_budget": 0}, 0),
        ("/v1/completions", {"thinking_token_budget": 7}, 7),
        ("/v1/chat/completions", {"thinking": {"type": "enabled", "budget_tokens": 8}}, 8),
        ("/v1/chat/completions", {"max_thinking_tokens": 8, "thinking": {"type": "enabled", "budget_tokens": 8}}, 8),
        ("/v1/chat/completions", {"reasoning_effort": "low", "max_thinking_tokens": 9}, 9),
        ("/v1/chat/completions", {"chat_template_kwargs": {"thinking_budget": 10}}, 10),
        ("/v1/chat/completions", {"thinking": False}, None),
        ("/v1/responses", {"max_thinking_tokens": 7}, 7),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 8}}, 8),
        ("/v1/messages", {"thinking": {"type": "adaptive"}}, None),
        ("/v1/messages", {"output_config": {"effort": "low"}}, EFFORT_BUDGETS["low"]),
        ("/v1/completions", {"max_thinking_tokens": 7}, 7),
        *[("/v1/chat/completions", {"reasoning_effort": e}, b) for e, b in EFFORT_BUDGETS.items() if e != "none"],
        *[("/v1/responses", {"reasoning": {"effort": e}}, b) for e, b in EFFORT_BUDGETS.items() if e != "none"],
    ],
)
def test_what_the_engine_is_asked_for(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any], budget: int | None
) -> None:
    params = asked(client, engine, path, **fields)
    assert params.max_thinking_tokens == budget
    markers = ThinkingMarkers(open="<think>", close="</think>", behind="\n\n")
    assert params.thinking_markers == (None if budget is None else markers)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CONSTRAINED: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": SCHEMA}}], "tool_choice": "required"},
    ],
    "/v1/responses": [
        {"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}}},
        {"tools": [{"type": "function", "name": "x", "parameters": SCHEMA}], "tool_choice": "required"},
    ],
    "/v1/messages": [{"tools": [{"name": "x", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}],
}


@pytest.mark.parametrize("known", REASONING_FORMATS, ids=lambda known: known.name)
@pytest.mark.parametrize(("path", "fields"), [(path, fields) for path, all in CONSTRAINED.items() for fields in all])
def test_a_constraint_does_not_wait_for_reasoning_that_may_never_come(
    make_client: Any, engine: FakeEngine, known: ReasoningFormat, path: str, fields: dict[str, Any]
) -> None:
    """Reasoning that the prompt has not opened must be opened first, and half of the tokens are left behind it."""
    engine.info.max_model_len = 4096
    messages = known.name in CHANNELS
    client = make_client(engine, reasoning_parser=known.name, tool_call_parser=known.name if messages else "hermes")
    params = asked(client, engine, path, **fields)
    outputs = params.structured_outputs
    if messages and "tools" in fields:  # the grammar has the reasoning in it
        assert outputs is not None and outputs.after is None and "thought" in outputs.grammar
        return
    assert outputs is not None and outputs.after in (known.answer, known.close)
    assert outputs.openings == (() if known.always_open else known.openings)
    assert params.max_thinking_tokens == params.max_tokens // 2
    assert params.thinking_markers.opened == known.always_open


@pytest.mark.parametrize(("path", "fields"), [(path, fields) for path, all in CONSTRAINED.items() for fields in all])
def test_open_reasoning_leaves_room_for_a_constraint(
    client: TestClient, engine: FakeEngine, path: str, fields: dict[str, Any]
) -> None:
    engine.tokenizer = ByteTokenizer(OPENS)
    engine.info.max_model_len = 4096
    params = asked(client, engine, path, **fields)
    assert params.max_thinking_tokens == params.max_tokens // 2 and params.thinking_markers.opened
    if path == "/v1/chat/completions":
        assert asked(client, engine, path, **fields, max_thinking_tokens=3).max_thinking_tokens == 3
        assert asked(client, engine, path, **fields, thinking=False).max_thinking_tokens == 0


def test_efforts_are_ordered() -> None:
    budgets = [float("inf") if budget is None else budget for budget in EFFORT_BUDGETS.values()]
    assert budgets == sorted(budgets) and budgets[0] == 0


@pytest.mark.parametrize(
    ("template", "fields", "budget", "opened"),
    [
        (OPENS, {"max_thinking_tokens": 5}, 5, True),
        (OPENS, {"reasoning_effort": "none"}, 0, True),
        (OPENS, {"thinking": False}, 0, True),
        (OPENS, {"chat_template_kwargs": {"enable_thinking": False}}, 0, True),
        (SWITCH, {"thinking": False}, None, False),
        (SWITCH, {"reasoning_effort": "minimal"}, EFFORT_BUDGETS["minimal"], True),
        (KNOWS_EFFORT, {"reasoning_effort": "low"}, None, False),
        (KNOWS_EFFORT, {"reasoning_effort": "low", "max_thinking_tokens": 5}, 5, False),
    ],
)
def test_what_the_template_does_itself_is_left_to_it(
    client: TestClient, engine: FakeEngine, template: str, fields: dict[str, Any], budget: int | None, opened: bool
) -> None:
    """Efforts, and thinking turned off, where it knows them; else the engine ends the block that it opens."""
    engine.tokenizer = ByteTokenizer(template)
    params = asked(client, engine, "/v1/chat/completions", **fields)
    assert params.max_thinking_tokens == budget
    assert budget is None or params.thinking_markers.opened == opened


class TestChannels:
    """gpt-oss: what comes behind its reasoning begins with a marker of its own."""

    TEMPLATE = TEMPLATE + "{% if reasoning_effort %}({{ reasoning_effort }}){% endif %}<|start|>assistant"
    TOOLS = ({"type": "function", "function": {"name": "clock"}},)

    @pytest.fixture
    def client(self, make_client: Any, engine: FakeEngine) -> TestClient:
        engine.tokenizer = ByteTokenizer(self.TEMPLATE)
        engine.info.max_model_len = 4096
        return make_client(engine, reasoning_parser="harmony", tool_call_parser="harmony")

    def test_budget(self, client: TestClient, engine: FakeEngine) -> None:
        chat = "/v1/chat/completions"
        markers = asked(client, engine, chat, max_thinking_tokens=5).thinking_markers
        assert markers.close + markers.behind == "<|end|><|start|>assistant<|channel|>final<|message|>"
        markers = asked(client, engine, chat, max_thinking_tokens=5, tools=self.TOOLS).thinking_markers
        assert markers.close + markers.behind == "<|end|><|start|>assistant", "a call may follow"
        assert asked(client, engine, chat, reasoning_effort="low").max_thinking_tokens is None

    def test_constraints(self, client: TestClient, engine: FakeEngine) -> None:
        chat, json_object = "/v1/chat/completions", {"response_format": {"type": "json_object"}}
        outputs = asked(client, engine, chat, **json_object).structured_outputs
        assert outputs.after == "<|channel|>final<|message|>"
        assert outputs.openings == ("<|channel|>analysis<|message|>", outputs.after)
        outputs = asked(client, engine, chat, tools=self.TOOLS, tool_choice="required").structured_outputs
        assert outputs.after is None and "analysis" in outputs.grammar
        response = client.post(chat, json=BODIES[chat] | json_object | {"tools": self.TOOLS})
        assert response.status_code == 400 and "needs a tool_choice" in response.json()["error"]["message"]

    def test_an_answer(self, client: TestClient, engine: FakeEngine) -> None:
        engine.reply = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Paris"
        chat = "/v1/chat/completions"
        message = client.post(chat, json=BODIES[chat]).json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", "Paris")


def test_a_completions_prompt_may_open_the_block(client: TestClient, engine: FakeEngine) -> None:
    for prompt, opened in (("Hi<think>\n", True), ("<think> is a tag", False)):
        params = asked(client, engine, "/v1/completions", prompt=prompt, max_thinking_tokens=3)
        assert params.thinking_markers.opened is opened


@pytest.mark.parametrize(
    ("path", "fields", "field", "says"),
    [
        ("/v1/chat/completions", {"max_thinking_tokens": -1}, "max_thinking_tokens", "0"),
        (
            "/v1/chat/completions",
            {"max_thinking_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 6}},
            "max_thinking_tokens",
            "one setting",
        ),
        ("/v1/chat/completions", {"thinking_token_budget": -2}, "thinking_token_budget", "-1"),
        (
            "/v1/responses",
            {"max_thinking_tokens": 5, "thinking_token_budget": 6},
            "thinking_token_budget",
            "one setting",
        ),
        ("/v1/chat/completions", {"max_thinking_tokens": 5, "use_beam_search": True}, "max_thinking_tokens", "beam"),
        ("/v1/chat/completions", {"reasoning_effort": "low", "use_beam_search": True}, "use_beam_search", "budget"),
        ("/v1/completions", {"max_thinking_tokens": 5, "use_beam_search": True}, "max_thinking_tokens", "beam"),
        ("/v1/completions", {"max_thinking_tokens": 5, "allowed_token_ids": [7]}, "allowed_token_ids", "which end"),
    ],
)
def test_refusals(client: TestClient, path: str, fields: dict[str, Any], field: str, says: str) -> None:
    response = client.post(path, json=BODIES[path] | fields)
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == field and says in error["message"], error


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/completions"])
def test_a_model_without_reasoning(make_client: Any, engine: FakeEngine, path: str) -> None:
    """The engine could not keep max_thinking_tokens; what other servers' clients send to every model passes."""
    client = make_client(engine)
    response = client.post(path, json=BODIES[path] | {"max_thinking_tokens": 5})
    assert response.status_code == 400 and "marks its reasoning" in response.json()["error"]["message"]
    thinking = {"type": "enabled", "budget_tokens": 8}
    for other in ("/v1/chat/completions", "/v1/messages"):
        assert asked(client, engine, other, thinking=thinking).max_thinking_tokens is None


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A random model in a block that its template opens; its engine has a process of its own."""
    directory = tmp_path_factory.mktemp("thinking")
    template: Path = directory / "thinks.jinja"
    template.write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n<think>\n"
    )
    model = write_model(directory / "model", max_position_embeddings=1024)
    with served(
        str(model), served_model_name=MODEL, chat_template=str(template), reasoning_parser="think", dtype="float32",
        engine_process=True,
    ) as url:  # fmt: skip
        yield url


def marker_tokens(url: str) -> int:
    return len(httpx.post(f"{url}/tokenize", json={"prompt": "</think>\n\n"}).json()["tokens"])


BUDGET = 12
QUESTION = [{"role": "user", "content": "Why is the sky blue? Think at length, step by step."}]


class TestSDKs:
    def test_chat(self, url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            ask: dict[str, Any] = {
                "model": MODEL, "messages": QUESTION, "max_tokens": 40, "temperature": 0, "n": 2,
                "extra_body": {"max_thinking_tokens": BUDGET, "return_token_ids": True, "ignore_eos": True},
            }  # fmt: skip
            free = client.chat.completions.create(**ask | {"extra_body": {"return_token_ids": True}, "n": 1})
            whole = client.chat.completions.create(**ask)
            for choice in whole.choices:
                assert choice.token_ids[:BUDGET] == free.choices[0].token_ids[:BUDGET]  # type: ignore[attr-defined]
                assert choice.message.reasoning and choice.message.content  # type: ignore[attr-defined]
                assert free.choices[0].message.reasoning.startswith(choice.message.reasoning)  # type: ignore[attr-defined]
            assert whole.usage and whole.usage.completion_tokens_details
            assert whole.usage.completion_tokens_details.reasoning_tokens <= 2 * (BUDGET + marker_tokens(url))
            streamed = {0: ["", ""], 1: ["", ""]}
            for chunk in client.chat.completions.create(**ask, stream=True):
                for choice in chunk.choices:
                    delta = choice.delta.to_dict()
                    streamed[choice.index][0] += str(delta.get("reasoning") or "")
                    streamed[choice.index][1] += str(delta.get("content") or "")
            assert streamed == {c.index: [c.message.reasoning, c.message.content] for c in whole.choices}  # type: ignore[attr-defined]

    def test_reasoning_is_ended_while_it_streams(self, url: str) -> None:
        """Without a word it would take all tokens: the model is in a block that the template opens."""
        said, told = ["", ""], False
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            for chunk in client.chat.completions.create(
                model=MODEL, messages=QUESTION, max_tokens=600, temperature=0, stream=True,  # type: ignore[arg-type]
                extra_body={"reasoning_control": True, "ignore_eos": True},
            ):  # fmt: skip
                delta = chunk.choices[0].delta.to_dict()
                said = [
                    text + str(delta.get(name) or "") for text, name in zip(said, ("reasoning", "content"), strict=True)
                ]
                if said[0] and not told:
                    asked = {"id": chunk.id, "action": "reasoning_end"}
                    told = httpx.post(f"{url}/v1/chat/completions/control", json=asked).json()["success"]
        assert told and said[0] and len(said[1]) > len(said[0])

    def test_a_tool_call_behind_it(self, url: str) -> None:
        schema = {"type": "object", "properties": {"colour": {"enum": ["blue", "red"]}}, "required": ["colour"]}
        tool = {"type": "function", "function": {"name": "sky", "parameters": schema}}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(
                model=MODEL, messages=QUESTION, tools=[tool], tool_choice="required", max_tokens=90,  # type: ignore[arg-type]
                extra_body={"max_thinking_tokens": BUDGET},
            )  # fmt: skip
        message = answer.choices[0].message
        assert message.reasoning and message.tool_calls  # type: ignore[attr-defined]
        assert "colour" in message.tool_calls[0].function.arguments  # type: ignore[union-attr]

    def test_responses(self, url: str) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            ask: dict[str, Any] = {"model": MODEL, "input": QUESTION[0]["content"], "temperature": 0}
            answer = client.responses.create(**ask, reasoning={"effort": "none"}, max_output_tokens=30)
            assert answer.output_text.strip()
            assert not any(item.type == "reasoning" and item.content for item in answer.output)
            extra = {"max_thinking_tokens": BUDGET, "ignore_eos": True}
            bounded = client.responses.create(**ask, max_output_tokens=40, extra_body=extra)
            assert [item.type for item in bounded.output] == ["reasoning", "message"]

    def test_messages(self, url: str) -> None:
        import anthropic

        with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
            ask: dict[str, Any] = {
                "model": MODEL, "messages": QUESTION, "max_tokens": 40,
                "thinking": {"type": "enabled", "budget_tokens": BUDGET}, "extra_body": {"temperature": 0},
            }  # fmt: skip
            whole = client.messages.create(**ask)
            with client.messages.stream(**ask) as stream:
                streamed = stream.get_final_message()
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert [block.to_dict() for block in whole.content] == [block.to_dict() for block in streamed.content]
        assert whole.usage.output_tokens_details
        assert BUDGET <= whole.usage.output_tokens_details.thinking_tokens <= BUDGET + marker_tokens(url)
