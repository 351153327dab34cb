"""How model families write tool calls, and which way a chat template speaks; see also text/reasoning.py.

The formats are those that the families' templates and model cards show; names are vLLM's where it has the same parser.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from jaxllm.chat.calls import fenced_calls, json_calls, line_call, mistral_calls, sectioned_calls
from jaxllm.chat.elements import action_calls, invoked_calls
from jaxllm.chat.events import short_id
from jaxllm.chat.more_formats import MORE_FORMATS
from jaxllm.chat.notations import function_tag, gemma_call, keyed_call, wrapped_function_tag
from jaxllm.chat.output_format import (
    REASONING_ALIASES,
    TOOL_ALIASES,
    UNREAD,
    CallSyntax,
    Layout,
    OutputFormats,
    Tags,
    ToolFormat,
)
from jaxllm.chat.pythonic import pythonic_calls
from jaxllm.chat.source import Scan
from jaxllm.errors import ConfigError
from jaxllm.text.reasoning import HARMONY, HARMONY_TOKENS, REASONING_FORMATS, ReasoningFormat, template_reasoning

_BARE_JSON = CallSyntax(partial(json_calls, bare=True), first="{[")
_DEEPSEEK_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


def _sections(scan: Callable[..., Scan[None]], open: str, call: str) -> tuple[CallSyntax, ...]:
    """Calls that each begin with `call`, after `open`, which models leave out, or write before a call that is none."""
    return CallSyntax(scan, open, ends_reasoning=True), CallSyntax(partial(scan, inside=True), call)


def _json_call(name_key: str = "name", arguments_key: str = "arguments") -> str:
    return f'{{"{name_key}": "{{name}}", "{arguments_key}": '


def _deepseek(
    name: str, detect: tuple[tuple[str, ...], ...], prefix: str, middle: str, end: str, between: str
) -> ToolFormat:
    begin, call, separator, call_end, stop = _DEEPSEEK_MARKERS
    scan = partial(
        sectioned_calls,
        open=call,
        prefix=prefix,
        middles=("```json", separator),
        closers=("```", call_end),
        end=stop,
    )
    layout = Layout(
        start=begin,
        call=f"{call}{prefix}{{name}}{middle}",
        end=end + call_end,
        between=between,
        stop=stop,
        marked=begin,
    )
    return ToolFormat(name, _sections(scan, begin, call), layout, detect, _DEEPSEEK_MARKERS)


def _gemma(name: str, open: str, close: str, quote: str) -> ToolFormat:
    scan = partial(gemma_call, quote=quote, close=close)
    layout = Layout(f"{open}call:{{name}}", close, marked=open, arguments="gemma", quote=quote)
    syntax = CallSyntax(scan, open, ends_reasoning=True)
    return ToolFormat(name, (syntax,), layout, ((open,),), (open, close, quote))


def _invoked(name: str, prefix: str, calls: str, typed: bool) -> ToolFormat:
    """Calls as <invoke> tags within <`calls`>; where `typed`, each argument says whether it is text or JSON."""
    open, close = f"<{calls}>", f"</{calls}>"
    parameter = f'<{prefix}parameter name="{{key}}"' + (' string="{string}">' if typed else ">")
    layout = Layout(
        f'<{prefix}invoke name="{{name}}">\n',
        f"</{prefix}invoke>\n",
        start=f"{open}\n",
        stop=close,
        marked=open,
        arguments=Tags((parameter,), f"</{prefix}parameter>"),
    )
    scan = partial(invoked_calls, prefix=prefix, end=close)
    parts = ((prefix, calls.removeprefix(prefix)),) if prefix and not prefix.endswith(" ") else ()
    detect = ((open,), *parts)
    markers = (prefix.strip(),) if prefix else (open, close)
    return ToolFormat(name, _sections(scan, open, f'<{prefix}invoke name="'), layout, detect, markers)


def _function_tags(
    name: str, wrapper: str, detect: tuple[str, ...], *, lines: bool = True, verbatim: bool = False
) -> ToolFormat:
    """Calls as <function=…> tags within <`wrapper`>; values are written on `lines` of their own, or beside tags."""
    open, close = f"<{wrapper}>", f"</{wrapper}>"
    line = "\n" if lines else ""
    layout = Layout(
        f"{open}\n<function={{name}}>\n",
        f"</function>\n{close}",
        between="\n",
        marked=open,
        arguments=Tags(
            (f"<parameter={{key}}>{line}",),
            f"{line}</parameter>",
            also_ends=rf"{line and chr(92) + 'n'}<(\/function>|parameter=)",
            exact=True,
        ),
    )
    tag = partial(function_tag, wrapper=wrapper, verbatim=verbatim)
    wrapped = partial(wrapped_function_tag, wrapper=wrapper, verbatim=verbatim)
    syntaxes = CallSyntax(wrapped, open, ends_reasoning=True), CallSyntax(tag, "<function=")
    return ToolFormat(name, syntaxes, layout, (detect,), (open, close))


def _tagged(name: str, open: str, close: str, *detect: str) -> ToolFormat:
    """A list of JSON calls between two tags."""
    layout = Layout(_json_call(), "}", start=f"{open}[", between=", ", stop=f"]{close}", marked=open)
    scan = partial(json_calls, close=close)
    return ToolFormat(name, (CallSyntax(scan, open),), layout, (detect,), tuple(filter(None, (open, close))))


# The first whose strings the template has is the template's, so the more particular come first.
TOOL_FORMATS: tuple[ToolFormat, ...] = (
    *MORE_FORMATS,
    ToolFormat(
        HARMONY,
        (),
        Layout(
            " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
            between="<|call|><|start|>assistant",
            thought=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        ),
        (("<|channel|>analysis",),),
        HARMONY_TOKENS,
    ),
    _gemma("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    _gemma("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    _invoked("deepseek_v32", "｜DSML｜", "｜DSML｜function_calls", typed=True),
    _invoked("deepseek_v4", "｜DSML｜", "｜DSML｜tool_calls", typed=True),
    _invoked("deepseek_v41", "｜DSML｜ ", "｜DSML｜ calls", typed=True),
    _invoked("minimax_m2", "", "minimax:tool_call", typed=False),
    _deepseek(
        "deepseek_v3",
        detect=(("<｜tool▁calls▁begin｜>", "```json"),),
        prefix="function<｜tool▁sep｜>",
        middle="\n```json\n",
        end="\n```",
        between="\n",
    ),
    _deepseek(
        "deepseek_v31", detect=(("<｜tool▁calls▁begin｜>",),), prefix="", middle="<｜tool▁sep｜>", end="", between=""
    ),
    ToolFormat(
        "kimi_k2",
        _sections(
            partial(
                sectioned_calls,
                open="<|tool_call_begin|>",
                prefix="functions.",
                middles=("<|tool_call_argument_begin|>",),
                closers=("<|tool_call_end|>",),
                end="<|tool_calls_section_end|>",
                numbered=True,
            ),
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
        ),
        Layout(
            "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            start="<|tool_calls_section_begin|>",
            stop="<|tool_calls_section_end|>",
            marked="<|tool_calls_section_begin|>",
        ),
        (("<|tool_calls_section_begin|>",),),
        (
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    ToolFormat(
        "cohere_command",
        (CallSyntax(partial(json_calls, close="<|END_ACTION|>"), "<|START_ACTION|>"),),
        Layout(
            '{"tool_call_id": "{index}", ' + _json_call("tool_name", "parameters")[1:],
            "}",
            start="<|START_ACTION|>[",
            between=", ",
            stop="]<|END_ACTION|>",
            marked="<|START_ACTION|>",
        ),
        (("<|START_ACTION|>",),),
        ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    ToolFormat(
        "command_r",
        (CallSyntax(action_calls, "Action:"),),
        Layout(
            _json_call("tool_name", "parameters"),
            "}",
            start="Action: ```json\n[",
            between=", ",
            stop="]\n```",
            marked="Action: ```json\n[",
        ),
        (("Action:", "tool_name"),),
    ),
    ToolFormat(
        "mistral",
        (CallSyntax(mistral_calls, "[TOOL_CALLS]"),),
        Layout("[TOOL_CALLS]{name}[ARGS]", marked="[TOOL_CALLS]"),
        (("[TOOL_CALLS]", "[ARGS]"),),
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        short_id,
    ),
    ToolFormat(
        "mistral_v3",
        (CallSyntax(mistral_calls, "[TOOL_CALLS]"),),
        Layout(_json_call(), "}", start="[TOOL_CALLS] [", between=", ", stop="]", marked="[TOOL_CALLS]"),
        (("[TOOL_CALLS]",),),
        ("[TOOL_CALLS]",),
        short_id,
    ),
    ToolFormat(
        "glm45",
        (CallSyntax(keyed_call, "<tool_call>", ends_reasoning=True),),
        Layout(
            "<tool_call>{name}",
            "</tool_call>",
            between="\n",
            marked="<tool_call>",
            arguments=Tags(("<arg_key>{key}</arg_key>", "<arg_value>"), "</arg_value>"),
        ),
        (("<arg_key>",),),
        ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    _function_tags("seed_oss", "seed:tool_call", ("<seed:tool_call>",), lines=False),
    _function_tags("mimo", "tool_call", ("<function=", "<parameter=", "MiMo"), lines=False, verbatim=True),
    _function_tags("qwen3_coder", "tool_call", ("<function=", "<parameter=")),
    ToolFormat(
        "llama_function_tag",
        (CallSyntax(function_tag, "<function="),),
        Layout("<function={name}>", "</function>", marked="<function="),
        (("<function=",),),
    ),
    _tagged("nemotron", "<TOOLCALL>", "</TOOLCALL>", "<TOOLCALL>"),
    _tagged("jamba", "<tool_calls>", "</tool_calls>", "<tool_calls>"),
    ToolFormat(
        "granite",
        (CallSyntax(json_calls, "<|tool_call|>"), CallSyntax(partial(json_calls, close="</tool_call>"), "<tool_call>")),
        Layout(_json_call(), "}", start="<|tool_call|>[", between=", ", stop="]", marked="<|tool_call|>"),
        (("<|tool_call|>", "<|start_of_role|>"),),
        ("<|tool_call|>",),
    ),
    ToolFormat(
        "hermes",
        (CallSyntax(partial(json_calls, close="</tool_call>"), "<tool_call>", ends_reasoning=True),),
        Layout(f"<tool_call>\n{_json_call()}", "}\n</tool_call>", between="\n", marked="<tool_call>"),
        (("<tool_call>",),),
        ("<tool_call>", "</tool_call>"),
    ),
    ToolFormat(
        "llama3_json",
        (CallSyntax(json_calls, "<|python_tag|>"), _BARE_JSON),
        Layout(_json_call("name", "parameters"), "}", between="; "),
        (("<|python_tag|>",), ('{"name": function name, "parameters"',)),
        ("<|python_tag|>",),
    ),
    ToolFormat(
        "llama4_pythonic",
        (
            CallSyntax(partial(pythonic_calls, end="<|python_end|>"), "<|python_start|>"),
            CallSyntax(partial(pythonic_calls, end=""), first="["),
        ),
        Layout("{name}(", ")", start="[", between=", ", stop="]", arguments="pythonic"),
        (("[func_name1(",), ("<|python_start|>",)),
        ("<|python_start|>", "<|python_end|>"),
    ),
    _tagged("functools", "functools", "", "functools"),
    ToolFormat(
        "phi4_mini_json",
        (CallSyntax(partial(json_calls, close="<|/tool_call|>"), "<|tool_call|>"), CallSyntax(json_calls, "functools")),
        Layout(_json_call(), "}", start="<|tool_call|>[", between=", ", stop="]<|/tool_call|>", marked="<|tool_call|>"),
        (("<|tool_call|>",), ("<|tool|>",)),
        ("<|tool_call|>", "<|/tool_call|>"),
    ),
    ToolFormat(
        "glm4", (CallSyntax(line_call),), Layout("{name}\n", between="\n"), (("<|observation|>",), ("[gMASK]",))
    ),
    ToolFormat(
        "json",
        (
            CallSyntax(fenced_calls, "```"),
            CallSyntax(partial(json_calls, close="</tool_call>"), "<tool_call>"),
            _BARE_JSON,
        ),
        Layout(_json_call(), "}", between="\n"),
        ((),),
    ),
)

Named = TypeVar("Named", ToolFormat, ReasoningFormat)


def detect_formats(
    chat_template: str | None, tool_call_parser: str = "auto", reasoning_parser: str = "auto"
) -> OutputFormats:
    """The formats that a model answers in.

    `chat_template` is its Jinja source. A template that shows no format of tool calls gets "json". A parser of "auto"
    is detected from the template, "none" parses nothing, and a name takes that format; vLLM's names are known too.
    Where one of the two is a format of messages on channels, "auto" means the same for the other.

    Raises:
        ConfigError: a parser has an unknown name, or the two do not go together.
    """
    template = chat_template or ""
    spoken = next((known for known in TOOL_FORMATS if _speaks(template, known)), None)
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
        raise ConfigError(
            f"tool_call_parser is {tool_call_parser!r} and reasoning_parser is {reasoning_parser!r}; answers in the "
            f"format {channels} are messages, so {mended} auto or none"
        )
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
    """What to say of a name that is none of `names`, and what is nearest to it."""
    nearest = UNREAD.get(wanted, "")
    if wanted not in UNREAD:
        close = difflib.get_close_matches(wanted, [*names, *aliases], n=1)
        nearest = close[0] if close else ""
    hint = f"; the nearest is {nearest}" if nearest in (*names, *aliases) else ""
    known = ", a format of vLLM's that jaxllm does not read" if wanted in UNREAD else ""
    return f"{known}; it must be one of {', '.join(names)}, or vLLM's name for one of them{hint}"


def _speaks(template: str, known: ToolFormat) -> bool:
    return any(all(text in template for text in group) for group in known.detect)
