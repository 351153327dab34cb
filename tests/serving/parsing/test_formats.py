"""Which formats a chat template speaks, and whether a prompt opens the reasoning."""

from __future__ import annotations

from itertools import permutations

import pytest

from jaxllm.chat.formats import REASONING_ALIASES, TOOL_ALIASES, TOOL_FORMATS, UNREAD, detect_formats
from jaxllm.errors import ConfigError
from jaxllm.text.reasoning import CHANNELS, REASONING_FORMATS, opens_reasoning

# What is telling in the families' templates.
TEMPLATES = {
    "Qwen3": (
        "{%- if tools %}For each function call, return a json object with function name and arguments within XML tags:"
        '<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n'
        "</tool_call>{%- endif %}{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}",
        "hermes",
        "think",
    ),
    "Qwen3-Coder": ("'<tool_call>\\n<function=' + tool_call.name + '>\\n' + '<parameter=' + name", "qwen3_coder", None),
    "Qwen3.5": (
        "<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>\\nvalue_1\\n</parameter>"
        "{%- if '</think>' in content %}{%- set reasoning_content = content.split('</think>')[0] %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{{- '<think>\\n' }}",
        "qwen3_coder",
        "think",
    ),
    "MiniMax M3": ("{%- set ns = ']<]minimax[>[' -%}'<invoke name=' <mm:think>", "minimax_m3", "minimax_m3"),
    "LFM2.5": ("'<|tool_call_start|>[' + calls + ']<|tool_call_end|>' <think> </think>", "lfm2", "think"),
    "LFM2": ("List of tools: <|tool_list_start|>[{}]<|tool_list_end|> <|tool_response_start|>", "lfm2", None),
    "OLMo 3": ("'<function_calls>' + calls + '</function_calls>' <functions>", "olmo3", None),
    "Apertus": ("'<|tools_prefix|>' '<|tools_suffix|>' '<|inner_prefix|>'", "apertus", "apertus"),
    "dots": ("<dots_function_call><invoke name=", "dots", None),
    "PLaMo 3": ("<|plamo:begin_tool_requests:plamo|> <|plamo:begin_think:plamo|>", "plamo3", "plamo3"),
    "Hy 3": ("<tool_calls><tool_call>' + name + '<tool_sep>' <arg_key> <think></think>", "hy_v3", "think"),
    "Hy 3, as released": (
        "{% set HYTK = ':opensource' %}{{ '<tool_calls{}>'.format(HYTK) }}{{ '<tool_sep{}>'.format(HYTK) }}"
        "{{ '<arg_key{}>'.format(HYTK) }}{{ '<think{}></think{}>'.format(HYTK, HYTK) }}",
        "hy_v3_opensource",
        "hy_v3_opensource",
    ),
    "MiniCPM5": (
        "<tools></tools> using:\n<function name=\"function-name\"><param name=\"param-name\">param-value</param>"
        "{{- '<think>\n\n</think>\n\n' }}",
        "minicpm5",
        "think",
    ),
    "Muse": (
        "writing a \"<atem:function_calls>\" block: <atem:invoke name=\"$FUNCTION_NAME\"> # Valid recipients: \"self\"",
        "muse",
        "muse",
    ),
    "K2 Horizon": ("<ifm|tool_calls><ifm|tool_call>", "k2_horizon", None),
    "Step 3": ("<｜tool_calls_begin｜> function <｜tool_sep｜> <steptml:invoke name=", "step3", None),
    "LongCat": ("<longcat_tool_call> <longcat_think>", "longcat", "longcat"),
    "InternLM 2.5": ("<|action_start|><|plugin|>", "internlm", None),
    "Granite 20B function calling": ("<function_call> {", "granite-20b-fc", None),
    "GigaChat 3": ("<|function_call|>", "gigachat3", None),
    "MiMo V2": ("You are MiMo '<tool_call><function=' + name + '><parameter=' + key <think></think>", "mimo", "think"),
    "Seed-OSS": ("'<seed:tool_call>\\n<function=' + name + '<parameter=' + key <seed:think>", "seed_oss", "seed_oss"),
    "Granite 3.2": ("<|start_of_role|>Write 'Here is my thought process:' <|tool_call|>", "granite", "granite"),
    "Hunyuan A13B": ("<tool_calls> <think> <answer>", "jamba", "hunyuan_a13b"),
    "Hunyuan A13B without answers": ("<tool_calls> <think>\\n\\n</think> <|extra_0|>", "jamba", "hunyuan_a13b"),
    "GigaChat 3 10B": ("role_sep=\"<|role_sep|>\\n\" 'role': 'function call',", "gigachat3", None),
    "ERNIE 4.5 Thinking": ("<tool_call> <think> <response>", "hermes", "ernie45"),
    "Mistral-7B v0.3": ("{{- \"[TOOL_CALLS] [\" }}{{- '\"name\": ' }}", "mistral_v3", None),
    "Mistral-Small 3.2": ("'[TOOL_CALLS]' + name + '[CALL_ID]' + id + '[ARGS]' + arguments", "mistral", None),
    "Ministral 3": ("'[THINK]' + thinking + '[/THINK]' '[TOOL_CALLS]' + name + '[ARGS]'", "mistral", "mistral"),
    "Llama 3.1": ("{{- \"<|python_tag|>\" + tool_call.name + \".call(\" }}", "llama3_json", None),
    "Llama 3.2": (
        """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument names}' }}""",
        "llama3_json",
        None,
    ),
    "functionary 3.1": ("<function={name}>{parameters}</function> and <|python_tag|>", "llama_function_tag", None),
    "DeepSeek R1": (
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n' + '```json' "
        "{% if '</think>' in content %}<｜Assistant｜><think>\\n",
        "deepseek_v3",
        "think",
    ),
    "DeepSeek V3.1": (
        "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'",
        "deepseek_v31",
        None,
    ),
    "DeepSeek V3.2": (
        "{% set dsml = '｜DSML｜' %}'<' ~ dsml ~ 'function_calls>' <think></think>",
        "deepseek_v32",
        "think",
    ),
    "DeepSeek V4.1": ("<｜DSML｜ calls>\\n<｜DSML｜ invoke name=", "deepseek_v41", None),
    "DeepSeek V4": ("<｜DSML｜tool_calls>\n<｜DSML｜invoke name=", "deepseek_v4", None),
    "MiniMax M2": (
        "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<invoke name=\"' + name + '\"> <think> </think>",
        "minimax_m2",
        "think",
    ),
    "Kimi K2": (
        "<|tool_calls_section_begin|>{%- for tool_call in message['tool_calls'] -%}<|tool_call_begin|>{{ id }}"
        "<|tool_call_argument_begin|>{{ arguments }}<|tool_call_end|>",
        "kimi_k2",
        None,
    ),
    "Kimi K3": (
        "{%- macro open_tag(tag) -%}{{- '<|open|>' + tag -}}{{- '<|sep|>' -}}{{- open_tag('think') -}}"
        "{{- open_tag('tools') -}}",
        "kimi_k3",
        "kimi_k3",
    ),
    "Command R7B": (
        "<|START_THINKING|>{{message.tool_plan}}<|END_THINKING|>"
        "<|START_ACTION|>[{\"tool_call_id\": \"0\", \"tool_name\":",
        "cohere_command",
        "cohere",
    ),
    "Command R 08-2024": (
        "Write 'Action:' followed by a json-formatted list of actions: ```json\n[{\"tool_name\": title of the tool",
        "command_r",
        None,
    ),
    "Llama 4 pythonic": (
        "put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2()]",
        "llama4_pythonic",
        None,
    ),
    "gpt-oss": (
        "{{- '<|start|>assistant<|channel|>analysis<|message|>' }} to=functions.{{ name }}<|channel|>commentary json",
        "harmony",
        "harmony",
    ),
    "GLM-4": ("[gMASK]<sop>{% if message.role == 'tool' %}<|observation|>", "glm4", None),
    "GLM-4.5": ("[gMASK]<sop><tool_call>{function-name}\\n<arg_key>{key}</arg_key> <think></think>", "glm45", "think"),
    "Phi-4-mini": ("{{ '<|system|>' + '<|tool|>' + message['tools'] + '<|/tool|>' }}", "phi4_mini_json", None),
    "Granite 3.3": ("<|start_of_role|>assistant<|end_of_role|><|tool_call|>", "granite", None),
    "FunctionGemma": ("'<start_function_call>call:' + function['name'] + '{'", "functiongemma", None),
    "Gemma 4": ("'<|tool_call>call:' + name + '{' '<|channel>thought\\n<channel|>'", "gemma4", "gemma4"),
    "Granite 4": (
        "<|start_of_role|>system<|end_of_role|>return a json object within <tool_call></tool_call> XML tags:\n"
        "<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
        "hermes",
        None,
    ),
    "Falcon-H1": (
        "<|im_start|>system For each function call, return a json object within <tool_call></tool_call> tags:\n"
        "<tool_call>\n"
        "{'arguments': <args-dict>, 'name': <function-name>}\n</tool_call>",
        "hermes",
        None,
    ),
    "Nemotron 3 Nano": (
        "<|im_start|>assistant\n<think></think> <tool_call>\n<function=example_function_name>\n<parameter=example_1>",
        "qwen3_coder",
        "think",
    ),
    "Nemotron Nano 2": ("<TOOLCALL>[{...}]</TOOLCALL> <think></think>", "nemotron", "think"),
    "firefunction": ("functools[{'name': ...}]", "functools", None),
    "Apriel": ("<tool_calls>[{...}]</tool_calls> and <tool_call>", "jamba", None),
    "Solar Open": (
        "{{ '<|begin|>assistant<|think|>' + thought + '<|end|>' }}{{ '<|begin|>assistant<|tool_calls|>' }}"
        "{{ '<|tool_call:begin|>' + id + '<|tool_call:name|>' + name + '<|tool_call:args|>' + arguments }}",
        "solar_open",
        "solar_open",
    ),
    "Solar Open 2": (
        "<|im:start|>assistant<|im:content|><|think:start|><|think:end|><|tool_call:start|>' + name + '\\n"
        "<|tool_arg:start|>' + key + '<|tool_arg:value|>' + value + '<|tool_arg:end|>",
        "solar_open2",
        "solar_open2",
    ),
    "functionary 3.2": (
        "Respond in this format:\\n>>>${recipient}\\n${content}\\n {{ '>>>all\\n' + message['content'] }}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n>>>' }}",
        "functionary_v32",
        None,
    ),
    "SmolLM3": (
        "<think> Thought section </think> {%- for tool in xml_tools[:] -%} within <tool_call></tool_call> XML tags:"
        '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>'
        "{%- if python_tools -%} Python code between '<code>' and '</code>' tags, it will be executed",
        "hermes",
        "think",
    ),
    "SmolLM2": ("{{'<|im_start|>' + message['role'] + '\\n' + message['content']}}", "json", None),
}  # fmt: skip


@pytest.mark.parametrize("model", TEMPLATES)
def test_detection(model: str) -> None:
    template, tools, reasoning = TEMPLATES[model]
    formats = detect_formats(template)
    assert formats.tools is not None and formats.tools.name == tools
    assert (formats.reasoning.name if formats.reasoning else None) == reasoning


def test_every_tool_format_is_detected_from_some_template() -> None:
    assert {known.name for known in TOOL_FORMATS} == {tools for _, tools, _ in TEMPLATES.values()}


def test_names_override_the_template() -> None:
    template = TEMPLATES["Qwen3"][0]
    assert detect_formats(template, "mistral", "mistral").markers == (
        "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
    )  # fmt: skip
    nothing = detect_formats(template, "none", "none")
    assert (nothing.tools, nothing.reasoning, nothing.markers) == (None, None, ())
    assert detect_formats(None).reasoning is None


# The names in vLLM 0.33.
VLLM_TOOLS = [
    "dots", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "deepseek_v41", "cohere_command3",
    "cohere_command4", "ernie45", "glm45", "glm47", "ling3", "granite-20b-fc", "granite", "granite4", "hermes",
    "hf", "beam", "poolside_v1", "hunyuan_a13b", "hy_v3", "hy_v4", "internlm", "jamba", "lfm2", "kimi_k2",
    "kimi_k3", "k2_horizon", "llama3_json", "llama4_json", "llama4_pythonic", "longcat", "mimo", "minimax_m2",
    "minimax_m3", "minicpm5", "mistral", "olmo3", "plamo3", "muse", "muse_glimmer", "musespark1x", "openai",
    "phi4_mini_json", "pythonic", "qwen3_coder", "qwen3_json", "qwen3_xml", "seed_oss", "step3", "step3p5",
    "step5", "inkling", "xlam", "gigachat3", "functiongemma", "gemma4", "apertus",
]  # fmt: skip
VLLM_REASONING = [
    "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "poolside_v1", "cohere_command3",
    "cohere_command4", "ernie45", "gemma4", "glm45", "glm47", "ling3", "openai_gptoss", "granite",
    "granite_thinking_parser", "hf", "beam", "holo2", "hunyuan_a13b", "hy_v3", "hy_v4", "kimi_k2", "kimi_k3",
    "k2_horizon", "mimo", "minicpmv", "minimax_m2", "minimax_m2_append_think", "minimax_m3", "mistral",
    "nemotron_v3", "olmo3", "plamo3", "muse", "muse_glimmer", "musespark1x", "qwen3", "seed_oss", "step3",
    "step3p5", "step5", "inkling",
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "name"),
    [("tool_call_parser", name) for name in VLLM_TOOLS] + [("reasoning_parser", name) for name in VLLM_REASONING],
)
def test_vllms_names_are_taken_or_refused_as_what_they_are(field: str, name: str) -> None:
    try:
        formats = detect_formats(None, **{field: name})
    except ConfigError as error:
        assert name in UNREAD
        assert name not in (TOOL_ALIASES if field == "tool_call_parser" else REASONING_ALIASES)
        assert f"{field} is {name!r}, a format of vLLM's that jaxllm does not read; it must be one of" in str(error)
        assert not UNREAD[name] or str(error).endswith(f"; the nearest is {UNREAD[name]}")
    else:
        assert (formats.tools if field == "tool_call_parser" else formats.reasoning) is not None


def test_aliases_name_formats_and_hide_none() -> None:
    for aliases, formats in ((TOOL_ALIASES, TOOL_FORMATS), (REASONING_ALIASES, REASONING_FORMATS)):
        own = {known.name for known in formats}
        assert set(aliases.values()) <= own and not set(aliases) & own
    assert detect_formats(None, "openai", "openai_gptoss").channels == "harmony"


def test_a_variant_of_the_named_format_that_the_template_speaks() -> None:
    released = TEMPLATES["Hy 3, as released"][0]
    formats = detect_formats(released, "hy_v3", "hy_v3")
    assert formats.tools is not None and formats.tools.name == "hy_v3_opensource"
    assert formats.reasoning is not None and formats.reasoning.close == "</think:opensource>"
    formats = detect_formats(TEMPLATES["Hy 3"][0], "hy_v3", "hy_v3")
    assert formats.tools is not None and formats.tools.name == "hy_v3"
    assert formats.reasoning is not None and formats.reasoning.close == "</think>"


def test_functionary_marks_no_reasoning() -> None:
    for reasoning in ("auto", "none"):
        assert detect_formats(None, "functionary_v32", reasoning).reasoning is None
    with pytest.raises(ConfigError, match=r"functionary_v32 are messages, so reasoning_parser must be auto or none$"):
        detect_formats(None, "functionary_v32", "think")


@pytest.mark.parametrize("name", [known.name for known in REASONING_FORMATS if known.name in CHANNELS])
def test_messages_on_channels_are_read_for_calls_and_reasoning_alike(name: str) -> None:
    for tools, reasoning in ((name, "auto"), ("auto", name), (name, name)):
        formats = detect_formats(TEMPLATES["Qwen3"][0], tools, reasoning)
        assert formats.tools is not None and formats.reasoning is not None
        assert (formats.tools.name, formats.reasoning.name) == (name, name)
    assert detect_formats(None, "none", name).tools is None
    assert detect_formats(None, name, "none").reasoning is None
    for tools, reasoning in ((name, "think"), ("hermes", name)):
        with pytest.raises(ConfigError, match=f"'{tools}' and reasoning_parser is '{reasoning}'.*both must be {name}"):
            detect_formats(None, tools, reasoning)


def test_a_misspelt_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"; the nearest is qwen3_xml$"):
        detect_formats(None, "qwen3_xlm")
    with pytest.raises(ConfigError, match=r"name for one of them$"):
        detect_formats(None, "#")


@pytest.mark.parametrize("field", ["tool_call_parser", "reasoning_parser"])
def test_unknown_names_are_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is 'hermse'; it must be one of auto, none, .*mistral"):
        detect_formats(None, **{field: "hermse"})


def test_markers_of_one_format_are_told_apart_at_once() -> None:
    for known in TOOL_FORMATS:
        markers = [syntax.marker for syntax in known.syntaxes if syntax.marker]
        assert not [pair for pair in permutations(markers, 2) if pair[0].startswith(pair[1])]
        assert (known.written.start or known.written.call).startswith(known.mark)


@pytest.mark.parametrize(
    ("prompt", "continued", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", "", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", "", False),
        ("<|im_start|>assistant\n<think>\nHm", "<think>\nHm", True),
        ("<|im_start|>assistant\n<think>\nHm</think>So", "<think>\nHm</think>So", False),
    ],
)
def test_opens_reasoning(prompt: str, continued: str, opens: bool) -> None:
    assert opens_reasoning(detect_formats(None, reasoning_parser="think").reasoning, prompt, continued) is opens
    assert opens_reasoning(detect_formats(None, reasoning_parser="none").reasoning, prompt, continued) is False


@pytest.mark.parametrize(
    ("parser", "prompt", "opens"),
    [
        ("kimi_k2", "<|im_assistant|>assistant<|im_middle|>", False),
        ("kimi_k2", "<|im_assistant|>assistant<|im_middle|><think>", True),
        ("kimi_k2", "<|im_assistant|>assistant<|im_middle|><think></think>", False),
        ("hy_v3", "<｜hy_Assistant｜><think>", True),
        ("hy_v3_opensource", "<｜hy_Assistant:opensource｜><think:opensource>", True),
        ("hy_v3_opensource", "<｜hy_Assistant:opensource｜><think:opensource></think:opensource>", False),
        ("minimax_m2_append_think", "]~b]ai\n<think>\n", True),
        ("muse", "<|start|>assistant", False),
        ("solar_open", "<|begin|>assistant", False),
        ("solar_open", "<|begin|>assistant<|think|><|end|><|begin|>assistant", False),
        ("solar_open2", "<|im:start|>assistant<|im:content|><|think:start|>", True),
        ("solar_open2", "<|im:start|>assistant<|im:content|><|think:start|><|think:end|>", False),
    ],
)
def test_prompts_of_families_that_open_their_reasoning(parser: str, prompt: str, opens: bool) -> None:
    assert opens_reasoning(detect_formats(None, reasoning_parser=parser).reasoning, prompt) is opens


def test_a_model_that_never_opens_its_reasoning() -> None:
    reasoning = detect_formats(None, reasoning_parser="deepseek_r1").reasoning
    assert opens_reasoning(reasoning, "<｜Assistant｜>")
    assert not opens_reasoning(reasoning, "<｜Assistant｜></think>")
    assert "deepseek_r1" in {known.name for known in REASONING_FORMATS}
