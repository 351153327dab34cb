"""Formats of tool calls that one model family writes each, put together from scanners that others share."""

from __future__ import annotations

from functools import partial

from jaxllm.chat.calls import json_calls, named_objects, sectioned_calls
from jaxllm.chat.channels import ATEM, ATEM_CALLS, ATEM_CALLS_END, SEPARATOR
from jaxllm.chat.elements import (
    CALLS,
    CALLS_END,
    CDATA,
    CDATA_END,
    FUNCTION,
    FUNCTION_END,
    INVOKE,
    INVOKE_END,
    MARK,
    NAMES,
    PARAM,
    PARAM_END,
    STEP_CALL,
    STEP_CALL_END,
    STEP_CALLS,
    STEP_CALLS_END,
    STEP_SEPARATOR,
    element_calls,
    function_elements,
    invoked_calls,
    step_calls,
)
from jaxllm.chat.notations import KeyedTags, keyed_calls
from jaxllm.chat.output_format import CallSyntax, Layout, Tags, ToolFormat
from jaxllm.chat.pythonic import listed_calls, python_lines
from jaxllm.chat.token_marks import (
    SOLAR_ARGUMENT,
    SOLAR_ARGUMENT_END,
    SOLAR_ARGUMENTS,
    SOLAR_CALL,
    SOLAR_CALL_2,
    SOLAR_CALL_2_END,
    SOLAR_CALL_END,
    SOLAR_NAME,
    SOLAR_SECTION,
    SOLAR_SECTION_END,
    SOLAR_VALUE,
    XTML_ARGUMENT,
    XTML_ARGUMENT_END,
    XTML_CALL,
    XTML_CALL_END,
    XTML_SEP,
    XTML_TOOLS,
    XTML_TOOLS_END,
    identified_calls,
    solar_id,
    tagged_call,
    xtml_calls,
)
from jaxllm.text.reasoning import FUNCTIONARY, MUSE, MUSE_TOKENS

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


def _keyed(
    name: str, form: str, separator: str, detect: tuple[str, ...], between: str = "", variant_of: str = ""
) -> ToolFormat:
    """Names and raw arguments between tags that are called as `form` says, in a section."""
    tags = KeyedTags(form)
    scan = partial(keyed_calls, tags=tags, separator=separator)
    start, call = tags.open("tool_calls"), tags.open("tool_call")
    key = f"{tags.open('arg_key')}{{key}}{tags.close('arg_key')}"
    layout = Layout(
        f"{call}{{name}}{separator}",
        tags.close("tool_call"),
        start=start,
        between=between,
        stop=tags.close("tool_calls"),
        marked=start,
        arguments=Tags((key, tags.open("arg_value")), tags.close("arg_value")),
    )
    names = ("tool_calls", "tool_call", "arg_key", "arg_value")
    markers = (*filter(None, (separator,)), *(mark for name in names for mark in (tags.open(name), tags.close(name))))
    syntaxes = CallSyntax(scan, start, ends_reasoning=True), CallSyntax(partial(scan, inside=True), call)
    return ToolFormat(name, syntaxes, layout, (detect,), markers, variant_of=variant_of)


MORE_FORMATS: tuple[ToolFormat, ...] = (
    _keyed("hy_v3", "{}", "<tool_sep>", ("<tool_calls>", "<tool_sep>"), between="\n"),
    _keyed(
        "hy_v3_opensource",
        "{}:opensource",
        "<tool_sep:opensource>",
        ("<tool_sep", ":opensource"),
        between="\n",
        variant_of="hy_v3",
    ),
    _keyed("k2_horizon", "ifm|{}", "", ("<ifm|tool_calls>",), between="\n"),
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
        MUSE,
        (),
        Layout(
            f' to={{name}}<|message|>{ATEM_CALLS}\n<{ATEM}invoke name="{{name}}">\n',
            f"</{ATEM}invoke>\n{ATEM_CALLS_END}",
            between="<|eom|><|start|>assistant",
            thought=(" to=self<|message|>", "<|eom|><|start|>assistant"),
            arguments=Tags((f'<{ATEM}parameter name="{{key}}">',), f"</{ATEM}parameter>"),
        ),
        ((ATEM_CALLS,),),
        MUSE_TOKENS,
    ),
    ToolFormat(
        FUNCTIONARY, (), Layout("{name}\n", between=SEPARATOR), ((f"{SEPARATOR}all", f"{SEPARATOR}${{recipient}}"),)
    ),
    ToolFormat(
        "solar_open",
        (
            CallSyntax(identified_calls, SOLAR_SECTION, ends_reasoning=True),
            CallSyntax(partial(identified_calls, inside=True), SOLAR_CALL),
        ),
        Layout(
            f"{SOLAR_CALL}{{id}}{SOLAR_NAME}{{name}}{SOLAR_ARGUMENTS}",
            SOLAR_CALL_END,
            start=SOLAR_SECTION,
            marked=SOLAR_SECTION,
            thought=("<|think|>", "<|end|><|begin|>assistant"),
        ),
        ((SOLAR_CALL,),),
        (SOLAR_SECTION, SOLAR_SECTION_END, SOLAR_CALL, SOLAR_NAME, SOLAR_ARGUMENTS, SOLAR_CALL_END),
        solar_id,
    ),
    ToolFormat(
        "solar_open2",
        (CallSyntax(tagged_call, SOLAR_CALL_2, ends_reasoning=True),),
        Layout(
            f"{SOLAR_CALL_2}{{name}}\n",
            SOLAR_CALL_2_END,
            between="\n",
            marked=SOLAR_CALL_2,
            arguments=Tags((f"{SOLAR_ARGUMENT}{{key}}{SOLAR_VALUE}",), SOLAR_ARGUMENT_END),
        ),
        ((SOLAR_CALL_2,),),
        (SOLAR_CALL_2, SOLAR_CALL_2_END, SOLAR_ARGUMENT, SOLAR_VALUE, SOLAR_ARGUMENT_END),
    ),
    ToolFormat(
        "minicpm5",
        tuple(CallSyntax(function_elements, FUNCTION + name, ends_reasoning=True) for name in NAMES),
        Layout(
            f'{FUNCTION} name="{{name}}">',
            FUNCTION_END,
            between="\n",
            marked=f'{FUNCTION} name="',
            arguments=Tags(
                (f'{PARAM} name="{{key}}">',),
                PARAM_END,
                exact=True,
                between="",
                literal=(CDATA, CDATA_END),
                markup="<&\n",
            ),
        ),
        ((f"{FUNCTION} name=", f"{PARAM} name="),),
        (FUNCTION, FUNCTION_END, PARAM, PARAM_END),
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
        (
            CallSyntax(xtml_calls, XTML_TOOLS, ends_reasoning=True),
            CallSyntax(partial(xtml_calls, inside=True), XTML_CALL),
        ),
        Layout(
            f'{XTML_CALL}{{name}}" index="{{index}}"{XTML_SEP}',
            XTML_CALL_END,
            start=XTML_TOOLS,
            stop=XTML_TOOLS_END,
            marked=XTML_TOOLS,
            arguments=Tags(
                (f'{XTML_ARGUMENT}{{key}}" type="{{type}}"{XTML_SEP}',), XTML_ARGUMENT_END, exact=True, between=""
            ),
        ),
        (("'<|open|>'", "'tools'"), (XTML_TOOLS,)),
        ("<|open|>", "<|close|>", XTML_SEP),
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
            marked=CALLS,
            arguments=Tags((f"{MARK}<{{key}}>",), f"{MARK}</{{key}}>", exact=True, between=""),
        ),
        ((MARK,),),
        (MARK,),
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
            marked="<|action_start|><|plugin|>",
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
