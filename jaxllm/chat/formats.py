"""The formats in which the answers to a chat template come, by what the template shows or by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TypeVar

from jaxllm.chat import calls
from jaxllm.chat.channels import FUNCTIONARY_FORMAT, HARMONY_FORMAT, MUSE_FORMAT
from jaxllm.chat.elements import MINICPM5, MINIMAX_M3, STEP3, invoked
from jaxllm.chat.events import CallSyntax, Groups, OutputFormats, Tags, ToolFormat, Written, short_id
from jaxllm.chat.notations import (
    KIMI_K3,
    SOLAR_OPEN,
    SOLAR_OPEN2,
    function_tag,
    function_tags,
    gemma,
    keyed,
    keyed_call,
)
from jaxllm.chat.pythonic import json_or_pythonic_calls, python_lines, pythonic_calls
from jaxllm.errors import ConfigError
from jaxllm.text.reasoning import REASONING_FORMATS, ReasoningFormat, template_reasoning


def _by_alias(**names: str) -> dict[str, str]:
    return {alias: name for name, aliases in names.items() for alias in aliases.split()}


TOOL_ALIASES = _by_alias(
    cohere_command="cohere_command3 cohere_command4",
    glm45="glm47 ling3 poolside_v1",
    harmony="openai",
    hermes="ernie45 granite4 qwen3_json",
    jamba="hunyuan_a13b",
    json="xlam",
    llama3_json="llama4_json",
    llama4_pythonic="pythonic",
    muse="muse_glimmer musespark1x",
    qwen3_coder="qwen3_xml step3p5",
)
"""vLLM's names of formats of calls, by ours."""
REASONING_ALIASES = _by_alias(
    cohere="cohere_command3 cohere_command4",
    deepseek_r1="minimax_m2 step3 step5",
    harmony="openai_gptoss",
    muse="muse_glimmer musespark1x",
    think="deepseek_v3 deepseek_v4 deepseek_v41 glm45 glm47 granite_thinking_parser holo2 hy_v3 kimi_k2 ling3 "
    "mimo minicpmv nemotron_v3 olmo3 poolside_v1 qwen3 step3p5",
)
"""vLLM's names of formats of reasoning, by ours."""
UNREAD = {"beam": "", "hf": "auto", "hy_v4": "", "inkling": "", "k2_horizon": "", "step5": ""}
"""Formats of vLLM's that we do not read, and the nearest that we do; "" where none is near."""

Named = TypeVar("Named", ToolFormat, ReasoningFormat)


def detect_formats(
    chat_template: str | None, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> OutputFormats:
    """The formats that a model answers in, detected from the template where a parser is "auto"; "none" parses nothing.

    Formats of messages on channels go together. Raises ConfigError: a name is unknown, or the two do not go together.
    """
    template = chat_template or ""
    spoken = next((known for known in TOOL_FORMATS if known.is_spoken(template)), None)
    tools = _choose("tool_call_parser", tool_call_parser, TOOL_FORMATS, TOOL_ALIASES, spoken)
    detected = template_reasoning(template)
    reasoning = _choose("reasoning_parser", reasoning_parser, REASONING_FORMATS, REASONING_ALIASES, detected)
    channels = OutputFormats(tools, reasoning).channels
    if channels and tool_call_parser == "auto":
        tools = next(known for known in TOOL_FORMATS if known.name == channels)
    if channels and reasoning_parser == "auto":
        reasoning = next((known for known in REASONING_FORMATS if known.name == channels), None)
    if channels and {known.name for known in (tools, reasoning) if known} != {channels}:
        has_reasoning = channels in {known.name for known in REASONING_FORMATS}
        mended = f"both must be {channels}," if has_reasoning else "reasoning_parser must be"
        given = f"tool_call_parser is {tool_call_parser!r} and reasoning_parser is {reasoning_parser!r}"
        raise ConfigError(f"{given}; answers in the format {channels} are messages, so {mended} auto or none")
    return OutputFormats(tools, reasoning)


def _choose(
    field: str, wanted: str, formats: tuple[Named, ...], aliases: Mapping[str, str], detected: Named | None
) -> Named | None:
    if wanted == "none":
        return None
    if wanted == "auto":
        return detected
    own: dict[str, Named] = {known.name: known for known in formats}
    found = own.get(wanted) or own.get(aliases.get(wanted, ""))
    if found is None:
        raise ConfigError(f"{field} is {wanted!r}{_unknown(wanted, ('auto', 'none', *own), aliases)}")
    return detected if detected is not None and detected.variant_of == found.name else found


def _unknown(wanted: str, names: Sequence[str], aliases: Mapping[str, str]) -> str:
    nearest = UNREAD.get(wanted, "")
    if wanted not in UNREAD:
        close = difflib.get_close_matches(wanted, [*names, *aliases], n=1)
        nearest = close[0] if close else ""
    hint = f"; the nearest is {nearest}" if nearest in (*names, *aliases) else ""
    known = ", a format of vLLM's that jaxllm does not read" if wanted in UNREAD else ""
    return f"{known}; it must be one of {', '.join(names)}, or vLLM's name for one of them{hint}"


_BARE_JSON = CallSyntax(partial(calls.json_calls, bare=True), first="{[")
_NAME_AND_ARGUMENTS = '{"name": "{name}", "arguments": '
_NAME_AND_PARAMETERS = '{"name": "{name}", "parameters": '
_TOOL_CALL = CallSyntax(partial(calls.json_calls, close="</tool_call>"), "<tool_call>")
_DEEPSEEK_MARKERS = tuple(
    f"<｜tool▁{part}｜>" for part in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
)


def _deepseek(name: str, detect: tuple[str, ...], prefix: str, middle: str, end: str, between: str) -> ToolFormat:
    begin, call, separator, call_end, stop = _DEEPSEEK_MARKERS
    scan = partial(calls.prefixed_call, prefix=prefix, middles=("```json", separator), closers=("```", call_end))
    return ToolFormat(
        name,
        calls.sections(begin, call, scan, stop),
        Written(begin, f"{call}{prefix}{{name}}{middle}", end + call_end, between, stop),
        detect=(detect,),
        markers=_DEEPSEEK_MARKERS,
    )


def _kimi_k2() -> ToolFormat:
    parts = ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
    start, call, argument, call_end, stop = markers = tuple(f"<|tool_{part}|>" for part in parts)
    scan = partial(calls.prefixed_call, prefix="functions.", middles=(argument,), closers=(call_end,), numbered=True)
    written = Written(start, f"{call}functions.{{name}}:{{index}}{argument}", call_end, "", stop)
    return ToolFormat("kimi_k2", calls.sections(start, call, scan, stop), written, markers=markers)


def _plamo3() -> ToolFormat:
    parts = ("tool_requests", "tool_request", "tool_name", "tool_arguments")
    marks = [(f"<|plamo:begin_{part}:plamo|>", f"<|plamo:end_{part}:plamo|>") for part in parts]
    (start, stop), (call, call_end), (name, name_end), (arguments, arguments_end) = marks
    middle = f"{name_end}{arguments}<|plamo:constrain|>json<|plamo:msg|>"
    scan = partial(calls.prefixed_call, middles=(middle,), closers=(arguments_end, call_end))
    written = Written(start, f"{call}{name}{{name}}{middle}", arguments_end + call_end, "", stop)
    markers = (*chain.from_iterable(marks), "<|plamo:constrain|>", "<|plamo:msg|>")
    return ToolFormat("plamo3", calls.sections(start, call + name, scan, stop)[:1], written, markers=markers)


def _json_lines(name: str, open: str, close: str) -> ToolFormat:
    syntax = CallSyntax(partial(calls.json_calls, close=close), open, ends_reasoning=bool(close))
    markers = tuple(filter(None, (open, close)))
    return ToolFormat(
        name, (syntax,), Written("", f"{open}\n{_NAME_AND_ARGUMENTS}", f"}}\n{close}", "\n"), markers=markers
    )


def _json_list(
    name: str, open: str, close: str, *others: CallSyntax, call: str = _NAME_AND_ARGUMENTS, detect: Groups = ()
) -> ToolFormat:
    syntaxes = CallSyntax(partial(calls.json_calls, close=close), open), *others
    markers = tuple(filter(None, (open, close)))
    return ToolFormat(name, syntaxes, Written(f"{open}[", call, "}", ", ", f"]{close}"), detect=detect, markers=markers)


# The first whose strings the template has is the template's, so the more particular come first.
TOOL_FORMATS: tuple[ToolFormat, ...] = (
    keyed("hy_v3", "{}", "<tool_sep>", ("<tool_calls>", "<tool_sep>")),
    keyed("hy_v3_opensource", "{}:opensource", "<tool_sep:opensource>", ("<tool_sep", ":opensource"), "hy_v3"),
    keyed("k2_horizon", "ifm|{}", ""),
    STEP3,
    MUSE_FORMAT,
    FUNCTIONARY_FORMAT,
    SOLAR_OPEN,
    SOLAR_OPEN2,
    MINICPM5,
    ToolFormat(
        "lfm2",
        calls.marked(partial(json_or_pythonic_calls, end="<|tool_call_end|>"), "<|tool_call_start|>"),
        Written("<|tool_call_start|>[", "{name}(", ")", ", ", "]<|tool_call_end|>"),
        arguments="pythonic",
        detect=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        markers=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    ToolFormat(
        "olmo3",
        (CallSyntax(partial(python_lines, end="</function_calls>"), "<function_calls>"),),
        Written("<function_calls>", "{name}(", ")", "\n", "</function_calls>"),
        arguments="pythonic",
        markers=("<function_calls>", "</function_calls>"),
    ),
    ToolFormat(
        "apertus",
        calls.marked(partial(calls.named_objects, close="<|tools_suffix|>"), "<|tools_prefix|>"),
        Written("<|tools_prefix|>[", '{"{name}": ', "}", ", ", "]<|tools_suffix|>"),
        markers=("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    KIMI_K3,
    MINIMAX_M3,
    invoked("dots", "", "dots_function_call", alone=False),
    _plamo3(),
    _json_lines("longcat", "<longcat_tool_call>", "</longcat_tool_call>"),
    ToolFormat(
        "internlm",
        calls.marked(partial(calls.json_calls, close="<|action_end|>"), "<|action_start|><|plugin|>"),
        Written("", f"<|action_start|><|plugin|>\n{_NAME_AND_PARAMETERS}", "}\n<|action_end|>", "\n"),
        detect=(("<|action_start|>", "<|plugin|>"),),
        markers=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    _json_lines("granite-20b-fc", "<function_call>", ""),
    ToolFormat(
        "gigachat3",
        (CallSyntax(calls.json_calls, "<|function_call|>"), CallSyntax(calls.json_calls, "function call<|role_sep|>")),
        Written("", f"<|function_call|>{_NAME_AND_ARGUMENTS}", "}", "\n"),
        detect=(("<|function_call|>",), ("'function call'", "<|role_sep|>")),
        markers=("<|function_call|>", "<|role_sep|>"),
    ),
    HARMONY_FORMAT,
    gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    invoked("deepseek_v32", "｜DSML｜", "｜DSML｜function_calls", typed=True),
    invoked("deepseek_v4", "｜DSML｜", "｜DSML｜tool_calls", typed=True),
    invoked("deepseek_v41", "｜DSML｜ ", "｜DSML｜ calls", typed=True),
    invoked("minimax_m2", "", "minimax:tool_call"),
    _deepseek(
        "deepseek_v3",
        (_DEEPSEEK_MARKERS[0], "```json"),
        prefix="function<｜tool▁sep｜>",
        middle="\n```json\n",
        end="\n```",
        between="\n",
    ),
    _deepseek("deepseek_v31", _DEEPSEEK_MARKERS[:1], prefix="", middle="<｜tool▁sep｜>", end="", between=""),
    _kimi_k2(),
    _json_list(
        "cohere_command",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        call='{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": ',
    ),
    ToolFormat(
        "command_r",
        (CallSyntax(calls.action_calls, "Action:"),),
        Written("Action: ```json\n[", '{"tool_name": "{name}", "parameters": ', "}", ", ", "]\n```"),
        marked="Action: ```json\n[",
        detect=(("Action:", "tool_name"),),
    ),
    ToolFormat(
        "mistral",
        (CallSyntax(calls.mistral_calls, "[TOOL_CALLS]"),),
        Written("", "[TOOL_CALLS]{name}[ARGS]"),
        detect=(("[TOOL_CALLS]", "[ARGS]"),),
        markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        new_id=short_id,
    ),
    ToolFormat(
        "mistral_v3",
        (CallSyntax(calls.mistral_calls, "[TOOL_CALLS]"),),
        Written("[TOOL_CALLS] [", _NAME_AND_ARGUMENTS, "}", ", ", "]"),
        markers=("[TOOL_CALLS]",),
        new_id=short_id,
    ),
    ToolFormat(
        "glm45",
        calls.marked(keyed_call, "<tool_call>"),
        Written("", "<tool_call>{name}", "</tool_call>", "\n"),
        arguments=Tags(("<arg_key>{key}</arg_key>", "<arg_value>"), "</arg_value>"),
        detect=(("<arg_key>",),),
        markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    function_tags("seed_oss", "seed:tool_call", "<seed:tool_call>", lines=False),
    function_tags("mimo", "tool_call", "<function=", "<parameter=", "MiMo", lines=False, verbatim=True),
    function_tags("qwen3_coder", "tool_call", "<function=", "<parameter="),
    ToolFormat(
        "llama_function_tag", (CallSyntax(function_tag, "<function="),), Written("", "<function={name}>", "</function>")
    ),
    _json_list("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    _json_list("jamba", "<tool_calls>", "</tool_calls>"),
    _json_list("granite", "<|tool_call|>", "", _TOOL_CALL, detect=(("<|tool_call|>", "<|start_of_role|>"),)),
    _json_lines("hermes", "<tool_call>", "</tool_call>"),
    ToolFormat(
        "llama3_json",
        (CallSyntax(calls.json_calls, "<|python_tag|>"), _BARE_JSON),
        Written("", _NAME_AND_PARAMETERS, "}", "; "),
        detect=(("<|python_tag|>",), ('{"name": function name, "parameters"',)),
        markers=("<|python_tag|>",),
    ),
    ToolFormat(
        "llama4_pythonic",
        (
            CallSyntax(partial(pythonic_calls, end="<|python_end|>"), "<|python_start|>"),
            CallSyntax(partial(pythonic_calls, end=""), first="["),
        ),
        Written("[", "{name}(", ")", ", ", "]"),
        arguments="pythonic",
        detect=(("[func_name1(",), ("<|python_start|>",)),
        markers=("<|python_start|>", "<|python_end|>"),
    ),
    _json_list("functools", "functools", ""),
    _json_list(
        "phi4_mini_json",
        "<|tool_call|>",
        "<|/tool_call|>",
        CallSyntax(calls.json_calls, "functools"),
        detect=(("<|tool_call|>",), ("<|tool|>",)),
    ),
    ToolFormat(
        "glm4",
        (CallSyntax(calls.line_call),),
        Written("", "{name}\n", "", "\n"),
        detect=(("<|observation|>",), ("[gMASK]",)),
    ),
    ToolFormat(
        "json",
        (CallSyntax(calls.fenced_calls, "```"), _TOOL_CALL, _BARE_JSON),
        Written("", _NAME_AND_ARGUMENTS, "}", "\n"),
        detect=((),),
    ),
)
