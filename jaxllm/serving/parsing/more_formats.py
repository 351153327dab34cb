"""Formats of tool calls that one model family writes each, put together from scanners that others share."""

from __future__ import annotations

from functools import partial

from jaxllm.serving.parsing.calls import json_calls, named_objects, sectioned_calls
from jaxllm.serving.parsing.elements import CALLS, CALLS_END, INVOKE, INVOKE_END, MARK, element_calls
from jaxllm.serving.parsing.invocations import (
    STEP_CALL,
    STEP_CALL_END,
    STEP_CALLS,
    STEP_CALLS_END,
    STEP_SEPARATOR,
    invoked_calls,
    step_calls,
)
from jaxllm.serving.parsing.notations import keyed_calls
from jaxllm.serving.parsing.output_format import CallSyntax, Layout, Tags, ToolFormat
from jaxllm.serving.parsing.pythonic import listed_calls, python_lines
from jaxllm.serving.parsing.xtml import ARGUMENT, ARGUMENT_END, CALL, CALL_END, SEP, TOOLS, TOOLS_END, xtml_calls

_CALL = '{"name": "{name}", "arguments": '
_PLAMO = {
    f"{end} {part}": f"<|plamo:{end}_{part}:plamo|>"
    for part in ("tool_requests", "tool_request", "tool_name", "tool_arguments")
    for end in ("begin", "end")
}
_PLAMO_NAME = _PLAMO["begin tool_request"] + _PLAMO["begin tool_name"]
_PLAMO_ARGUMENTS = f"{_PLAMO['end tool_name']}{_PLAMO['begin tool_arguments']}<|plamo:constrain|>json<|plamo:msg|>"


def _json_between(name: str, open: str, close: str) -> ToolFormat:
    """Each call as JSON between two tags."""
    layout = Layout(f"{open}\n{_CALL}", f"}}\n{close}", between="\n", marked=open)
    syntax = CallSyntax(partial(json_calls, close=close), open, ends_reasoning=bool(close))
    return ToolFormat(name, (syntax,), layout, ((open,),), tuple(filter(None, (open, close))))


def _keyed(name: str, prefix: str, separator: str, detect: tuple[str, ...], between: str = "") -> ToolFormat:
    """Names and raw arguments between tags whose names begin with `prefix`, in a section."""
    scan = partial(keyed_calls, prefix=prefix, separator=separator)
    open, close = f"<{prefix}tool_calls>", f"</{prefix}tool_calls>"
    call, end = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
    arguments = Tags((f"<{prefix}arg_key>{{key}}</{prefix}arg_key>", f"<{prefix}arg_value>"), f"</{prefix}arg_value>")
    layout = Layout(
        f"{call}{{name}}{separator}", end, start=open, between=between, stop=close, marked=open, arguments=arguments
    )
    parts = (f"{end}{prefix}{part}>" for part in ("arg_key", "arg_value") for end in ("<", "</"))
    markers = (open, close, call, end, *filter(None, (separator,)), *parts)
    syntaxes = CallSyntax(scan, open, ends_reasoning=True), CallSyntax(partial(scan, inside=True), call)
    return ToolFormat(name, syntaxes, layout, (detect,), markers)


MORE_FORMATS: tuple[ToolFormat, ...] = (
    _keyed("hy_v3", "", "<tool_sep>", ("<tool_calls>", "<tool_sep>"), between="\n"),
    _keyed("k2_horizon", "ifm|", "", ("<ifm|tool_calls>",), between="\n"),
    ToolFormat(
        "step3",
        (
            CallSyntax(step_calls, STEP_CALLS, ends_reasoning=True),
            CallSyntax(partial(step_calls, inside=True), STEP_CALL),
        ),
        Layout(
            f'{STEP_CALL}function{STEP_SEPARATOR}<steptml:invoke name="{{name}}">\n',
            f"</steptml:invoke>{STEP_CALL_END}",
            start=STEP_CALLS,
            between="\n",
            stop=STEP_CALLS_END,
            marked=STEP_CALLS,
            arguments=Tags(('<steptml:parameter name="{key}">',), "</steptml:parameter>"),
        ),
        (("<steptml:",), (STEP_CALLS,)),
        (STEP_CALLS, STEP_CALLS_END, STEP_CALL, STEP_CALL_END, STEP_SEPARATOR),
    ),
    ToolFormat(
        "lfm2",
        (CallSyntax(partial(listed_calls, end="<|tool_call_end|>"), "<|tool_call_start|>", ends_reasoning=True),),
        Layout(
            "{name}(",
            ")",
            start="<|tool_call_start|>[",
            between=", ",
            stop="]<|tool_call_end|>",
            marked="<|tool_call_start|>",
            arguments="pythonic",
        ),
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    ToolFormat(
        "olmo3",
        (CallSyntax(partial(python_lines, end="</function_calls>"), "<function_calls>"),),
        Layout(
            "{name}(",
            ")",
            start="<function_calls>",
            between="\n",
            stop="</function_calls>",
            marked="<function_calls>",
            arguments="pythonic",
        ),
        (("<function_calls>",),),
        ("<function_calls>", "</function_calls>"),
    ),
    ToolFormat(
        "apertus",
        (CallSyntax(partial(named_objects, close="<|tools_suffix|>"), "<|tools_prefix|>", ends_reasoning=True),),
        Layout(
            '{"{name}": ',
            "}",
            start="<|tools_prefix|>[",
            between=", ",
            stop="]<|tools_suffix|>",
            marked="<|tools_prefix|>",
        ),
        (("<|tools_prefix|>",),),
        ("<|tools_prefix|>", "<|tools_suffix|>"),
    ),
    ToolFormat(
        "kimi_k3",
        (CallSyntax(xtml_calls, TOOLS, ends_reasoning=True), CallSyntax(partial(xtml_calls, inside=True), CALL)),
        Layout(
            f'{CALL}{{name}}" index="{{index}}"{SEP}',
            CALL_END,
            start=TOOLS,
            stop=TOOLS_END,
            arguments=Tags((f'{ARGUMENT}{{key}}" type="{{type}}"{SEP}',), ARGUMENT_END, exact=True, between=""),
        ),
        (("'<|open|>'", "'tools'"), (TOOLS,)),
        ("<|open|>", "<|close|>", SEP),
    ),
    ToolFormat(
        "minimax_m3",
        (
            CallSyntax(element_calls, CALLS, ends_reasoning=True),
            CallSyntax(partial(element_calls, inside=True), INVOKE),
        ),
        Layout(
            f'{INVOKE}{{name}}">',
            f"{INVOKE_END}\n",
            start=f"{CALLS}\n",
            stop=CALLS_END,
            arguments=Tags((f"{MARK}<{{key}}>",), f"{MARK}</{{key}}>", exact=True, between=""),
        ),
        ((MARK,),),
    ),
    ToolFormat(
        "dots",
        (
            CallSyntax(
                partial(invoked_calls, prefix="", end="</dots_function_call>"),
                "<dots_function_call>",
                ends_reasoning=True,
            ),
        ),
        Layout(
            '<invoke name="{name}">\n',
            "</invoke>\n",
            start="<dots_function_call>\n",
            stop="</dots_function_call>",
            marked="<dots_function_call>",
            arguments=Tags(('<parameter name="{key}">',), "</parameter>"),
        ),
        (("<dots_function_call>",),),
        ("<dots_function_call>", "</dots_function_call>"),
    ),
    ToolFormat(
        "plamo3",
        (
            CallSyntax(
                partial(
                    sectioned_calls,
                    open=_PLAMO_NAME,
                    prefix="",
                    middles=(_PLAMO_ARGUMENTS,),
                    closers=(_PLAMO["end tool_arguments"], _PLAMO["end tool_request"]),
                    end=_PLAMO["end tool_requests"],
                ),
                _PLAMO["begin tool_requests"],
                ends_reasoning=True,
            ),
        ),
        Layout(
            f"{_PLAMO_NAME}{{name}}{_PLAMO_ARGUMENTS}",
            _PLAMO["end tool_arguments"] + _PLAMO["end tool_request"],
            start=_PLAMO["begin tool_requests"],
            stop=_PLAMO["end tool_requests"],
            marked=_PLAMO["begin tool_requests"],
        ),
        ((_PLAMO["begin tool_requests"],),),
        (*_PLAMO.values(), "<|plamo:constrain|>", "<|plamo:msg|>"),
    ),
    _json_between("longcat", "<longcat_tool_call>", "</longcat_tool_call>"),
    ToolFormat(
        "internlm",
        (CallSyntax(partial(json_calls, close="<|action_end|>"), "<|action_start|><|plugin|>", ends_reasoning=True),),
        Layout(
            f"<|action_start|><|plugin|>\n{_CALL.replace('arguments', 'parameters')}",
            "}\n<|action_end|>",
            between="\n",
        ),
        (("<|action_start|>", "<|plugin|>"),),
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    _json_between("granite-20b-fc", "<function_call>", ""),
    ToolFormat(
        "gigachat3",
        (CallSyntax(json_calls, "<|function_call|>"), CallSyntax(json_calls, "function call<|role_sep|>")),
        Layout(f"<|function_call|>{_CALL}", "}", between="\n", marked="<|function_call|>"),
        (("<|function_call|>",), ("'function call'", "<|role_sep|>")),
        ("<|function_call|>", "<|role_sep|>"),
    ),
)
