"""What other servers call the formats that we read: vLLM's names for them."""

from __future__ import annotations

TOOL_ALIASES = {
    "cohere_command3": "cohere_command",
    "cohere_command4": "cohere_command",
    "ernie45": "hermes",
    "glm47": "glm45",
    "granite4": "hermes",
    "hunyuan_a13b": "jamba",
    "ling3": "glm45",
    "llama4_json": "llama3_json",
    "muse_glimmer": "muse",
    "musespark1x": "muse",
    "openai": "harmony",
    "poolside_v1": "glm45",
    "pythonic": "llama4_pythonic",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "xlam": "json",
}
REASONING_ALIASES = {
    "cohere_command3": "cohere",
    "cohere_command4": "cohere",
    "deepseek_v3": "think",
    "deepseek_v4": "think",
    "deepseek_v41": "think",
    "glm45": "think",
    "glm47": "think",
    "granite_thinking_parser": "think",
    "holo2": "think",
    "hy_v3": "think",
    "kimi_k2": "think",
    "ling3": "think",
    "mimo": "think",
    "muse_glimmer": "muse",
    "musespark1x": "muse",
    "minicpmv": "think",
    "minimax_m2": "deepseek_r1",
    "nemotron_v3": "think",
    "olmo3": "think",
    "openai_gptoss": "harmony",
    "poolside_v1": "think",
    "qwen3": "think",
    "step3": "deepseek_r1",
    "step3p5": "think",
    "step5": "deepseek_r1",
}
UNREAD = {
    "beam": "",
    "hf": "auto",
    "hy_v4": "",
    "inkling": "",
    "k2_horizon": "",
    "step5": "",
}
"""Formats of vLLM's that we do not read, and the nearest that we do; "" where none is near."""
