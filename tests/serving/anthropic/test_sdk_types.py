"""Whatever the newest Anthropic SDK's own types may send as null, or with its documented default, is accepted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Required, get_origin, get_type_hints

import pytest
from fastapi.testclient import TestClient

from tests.serving.anthropic.shared import HELLO, WEATHER

Body = dict[str, Any]
Embed = Callable[[Body], Body]

USE = {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}
CACHED = {"type": "ephemeral"}
CLEAR = {"type": "clear_tool_uses_20250919"}
TOKENS = {"type": "input_tokens", "value": 100_000}


def said(*contents: Any) -> Body:
    """A conversation that ends with the user's turn, and tools."""
    roles = ["user", "assistant"] * len(contents)
    return {"tools": [WEATHER], "messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


PLACES: dict[str, Embed] = {
    "message_create_params.MessageCreateParamsBase": lambda it: it,
    "message_create_params.MessageCreateParamsNonStreaming": lambda it: it,
    "beta.message_create_params.MessageCreateParamsBase": lambda it: it,
    "beta.message_create_params.MessageCreateParamsNonStreaming": lambda it: it,
    "message_count_tokens_params.MessageCountTokensParams": lambda it: it,
    "beta.message_count_tokens_params.MessageCountTokensParams": lambda it: it,
    "beta.BetaUserMessageParam": lambda it: {"messages": [{**HELLO[0], **it}]},
    "beta.BetaAssistantMessageParam": lambda it: {
        "messages": [*HELLO, {"role": "assistant", "content": "x", **it}, *HELLO]
    },
    "beta.BetaSystemMessageParam": lambda it: {
        "messages": [*HELLO, {"role": "system", "content": "x", "output_config": {"effort": "low"}, **it}],
    },
    "beta.BetaSystemMessageOutputConfigParam": lambda it: {
        "messages": [*HELLO, {"role": "system", "content": "x", "output_config": it}],
    },
    "beta.BetaTextBlockParam": lambda it: said([{"type": "text", "text": "x", **it}]),
    "beta.BetaThinkingBlockParam": lambda it: said(
        "x", [{"type": "thinking", "thinking": "x", "signature": "", **it}], "x"
    ),
    "beta.BetaRedactedThinkingBlockParam": lambda it: said(
        "x", [{"type": "redacted_thinking", "data": "x", **it}], "x"
    ),
    "beta.BetaToolUseBlockParam": lambda it: said("x", [{**USE, **it}], [RESULT]),
    "beta.BetaToolResultBlockParam": lambda it: said("x", [USE], [{**RESULT, **it}]),
    "beta.BetaToolReferenceBlockParam": lambda it: said(
        "x", [USE], [{**RESULT, "content": [{"type": "tool_reference", "tool_name": "get_weather", **it}]}]
    ),
    "beta.BetaToolParam": lambda it: {"tools": [{**WEATHER, **it}]},
    "beta.BetaToolChoiceAutoParam": lambda it: {"tools": [WEATHER], "tool_choice": {"type": "auto", **it}},
    "beta.BetaToolChoiceAnyParam": lambda it: {"tools": [WEATHER], "tool_choice": {"type": "any", **it}},
    "beta.BetaToolChoiceToolParam": lambda it: {
        "tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather", **it},
    },
    "beta.BetaToolChoiceNoneParam": lambda it: {"tools": [WEATHER], "tool_choice": {"type": "none", **it}},
    "beta.BetaCacheControlEphemeralParam": lambda it: {"cache_control": {**CACHED, **it}},
    "beta.BetaThinkingConfigEnabledParam": lambda it: {
        "thinking": {"type": "enabled", "budget_tokens": 1024, **it},
    },
    "beta.BetaThinkingConfigAdaptiveParam": lambda it: {"thinking": {"type": "adaptive", **it}},
    "beta.BetaThinkingConfigDisabledParam": lambda it: {"thinking": {"type": "disabled", **it}},
    "beta.BetaOutputConfigParam": lambda it: {"output_config": it},
    "beta.BetaJSONOutputFormatParam": lambda it: {
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}, **it}},
    },
    "beta.BetaMetadataParam": lambda it: {"metadata": it},
    "beta.BetaDiagnosticsParam": lambda it: {"diagnostics": it},
    "beta.BetaBillingPolicyParam": lambda it: {"billing_policy": {"type": "billing_policy", **it}},
    "beta.BetaContextManagementConfigParam": lambda it: {"context_management": it},
    "beta.BetaClearThinking20251015EditParam": lambda it: {
        "context_management": {"edits": [{"type": "clear_thinking_20251015", **it}]},
    },
    "beta.BetaClearToolUses20250919EditParam": lambda it: {"context_management": {"edits": [{**CLEAR, **it}]}},
    "beta.BetaToolUsesKeepParam": lambda it: {
        "context_management": {"edits": [{**CLEAR, "keep": {"type": "tool_uses", "value": 3, **it}}]},
    },
    "beta.BetaInputTokensTriggerParam": lambda it: {
        "context_management": {"edits": [{**CLEAR, "trigger": {**TOKENS, **it}}]},
    },
}  # fmt: skip
"""Where each of the SDK's types stands in a request; those that are missing are refused by name, as a whole."""

NOT_COUNTED = {"BetaMetadataParam", "BetaDiagnosticsParam"}
"""Types that stand in no request for a count."""

DEFAULTS: dict[str, Any] = {
    "allowed_callers": ["direct"], "betas": [], "bill_to": "self", "caller": {"type": "direct"}, "citations": [],
    "clear_at": "never", "clear_tool_inputs": False, "defer_loading": False, "disable_parallel_tool_use": False,
    "display": "summarized", "edits": [], "fallbacks": "default", "input_examples": [], "is_error": False,
    "keep": {"BetaClearToolUses20250919EditParam": {"type": "tool_uses", "value": 3},
             "BetaClearThinking20251015EditParam": {"type": "thinking_turns", "value": 1}},
    "mcp_servers": [], "metadata": {}, "output_config": {}, "service_tier": "auto", "speed": "standard",
    "stop_sequences": [], "stream": False, "strict": False, "tool_choice": {"type": "auto"}, "tools": [],
    "trigger": TOKENS, "ttl": "5m", "type": "custom", "block_binding": {},
}  # fmt: skip
"""What optional fields are where they are left out, as the SDK documents them; of the others that is not said."""


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_nulls_and_defaults(client: TestClient, path: str) -> None:
    from anthropic import types

    refused = []
    for place, embed in PLACES.items():
        *parts, name = place.split(".")
        if path.endswith("count_tokens") and ("message_create_params" in parts or name in NOT_COUNTED):
            continue
        module: Any = types
        for part in parts:
            module = getattr(module, part)
        kind = getattr(module, name)
        hints = get_type_hints(kind, include_extras=True)
        for field in (field for field, hint in hints.items() if get_origin(hint) is not Required):
            values = [None]
            if field in DEFAULTS:
                default = DEFAULTS[field]
                values.append(default[name] if isinstance(default, dict) and name in default else default)
            for value in values:
                body = {"messages": HELLO, **embed({field: value})}
                if path == "/v1/messages":
                    body = {"max_tokens": 2000, **body}
                if field == "tool_choice" and value:
                    body["tools"] = [WEATHER]
                response = client.post(path, json=body)
                if response.status_code != 200:
                    refused.append((place, field, value, response.json()["error"]["message"]))
    assert not refused
