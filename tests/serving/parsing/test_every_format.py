"""A call or two in every format, whole and in pieces."""

from __future__ import annotations

import pytest

from jaxllm.chat.formats import TOOL_FORMATS
from tests.serving.parsing.splitting import JSON_CALL, PARIS, PARIS_CALL, parse_pieces, parse_whole, parser, seen

V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + PARIS + "\n```<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("format_name", "answer", "calls"),
    [
        ("mistral_v3", f"[TOOL_CALLS] [{JSON_CALL}]", [PARIS_CALL]),
        (
            "mistral",
            f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]get_time[ARGS]{{}}",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{PARIS}", [PARIS_CALL]),
        ("mistral", f"[TOOL_CALLS]get_weather{PARIS}", [PARIS_CALL]),
        ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', [PARIS_CALL]),
        ("llama3_json", f"<|python_tag|>{JSON_CALL}; {JSON_CALL}", [PARIS_CALL, PARIS_CALL]),
        ("llama3_json", f'{{"type": "function", "name": "get_weather", "parameters": {PARIS}}}', [PARIS_CALL]),
        ("llama3_json", f'{{"type": "function", "function": {JSON_CALL}}}', [PARIS_CALL]),
        ("llama_function_tag", f"<function=get_weather>{PARIS}</function>", [PARIS_CALL]),
        ("hermes", f"<tool_call>\n{JSON_CALL}\n</tool_call>\n<tool_call>{JSON_CALL}</tool_call>", [PARIS_CALL] * 2),
        ("hermes", f'<tool_call>{{"arguments": {PARIS}, "name": "get_weather"}}</tool_call>', [PARIS_CALL]),
        ("hermes", '<tool_call>{"name": "get_time"}</tool_call>', [("get_time", "{}")]),
        ("hermes", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', [("get_time", "{}")]),
        ("hermes", f"<tool_call>{JSON_CALL}", [PARIS_CALL]),
        ("deepseek_v3", f"<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>", [PARIS_CALL] * 2),
        (
            "deepseek_v31",
            f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            [PARIS_CALL],
        ),
        (
            "deepseek_v32",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">7</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="get_time">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            [("get_weather", '{"city": "7", "days": 7}'), ("get_time", "{}")],
        ),
        (
            "deepseek_v4",
            '<｜DSML｜tool_calls><｜DSML｜invoke name="get_time"/></｜DSML｜tool_calls>',
            [("get_time", "{}")],
        ),
        (
            "deepseek_v41",
            '<｜DSML｜ calls>\n<｜DSML｜ invoke name="get_weather">\n<｜DSML｜ parameter name="city" string="true">'
            "Paris</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>",
            [PARIS_CALL],
        ),
        (
            "minimax_m2",
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris\n<b>"x"</b></parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time"></invoke>\n</minimax:tool_call>',
            [("get_weather", '{"city": "Paris\\n<b>\\"x\\"</b>", "days": 3}'), ("get_time", "{}")],
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            f"{PARIS}<|tool_call_end|><|tool_call_begin|>get_time:1 <|tool_call_argument_begin|>{{}}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        (
            "cohere_command",
            f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {PARIS}}},\n'
            '    {"tool_call_id": "1", "tool_name": "get_time", "parameters": {}}\n]<|END_ACTION|>',
            [PARIS_CALL, ("get_time", "{}")],
        ),
        (
            "command_r",
            f'Action: ```json\n[\n  {{\n    "tool_name": "get_weather",\n    "parameters": {PARIS}\n  }}\n]```',
            [PARIS_CALL],
        ),
        (
            "llama4_pythonic",
            "<|python_start|>[get_weather(city='Paris', days=2), get_time()]<|python_end|>",
            [("get_weather", '{"city": "Paris", "days": 2}'), ("get_time", "{}")],
        ),
        (
            "llama4_pythonic",
            "[get_weather(city=\"L'A\\\"\\n\", days=None, unit={'a': [True, -1.5e3, {}], \"b\": 'x)]'})]",
            [
                (
                    "get_weather",
                    '{"city": "L\'A\\"\\n", "days": null, "unit": {"a": [true, -1.5e3, {}], "b": "x)]"}}',
                )
            ],
        ),
        (
            "harmony",
            f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{PARIS}<|call|>"
            "<|start|>assistant<|channel|>commentary to=functions.get_time<|message|>{}",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        ("glm4", f"get_weather\n{PARIS}", [PARIS_CALL]),
        ("glm4", f"get_weather\n{PARIS}\nget_time\n{{}}", [PARIS_CALL, ("get_time", "{}")]),
        (
            "glm45",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
            [PARIS_CALL],
        ),
        ("glm45", "<tool_call>get_time</tool_call>", [("get_time", "{}")]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>",
            [PARIS_CALL],
        ),
        (
            "lfm2",
            "<|tool_call_start|>[get_weather(city='Paris'), get_time()]<|tool_call_end|>",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        ("lfm2", f"<|tool_call_start|>\n[{JSON_CALL}]<|tool_call_end|>", [PARIS_CALL]),
        (
            "olmo3",
            "<function_calls>get_weather(city='Paris')\nget_time()</function_calls>",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        (
            "apertus",
            f'<|tools_prefix|>[{{"get_weather": {PARIS}}}, {{"get_time": {{}}}}]<|tools_suffix|>',
            [PARIS_CALL, ("get_time", "{}")],
        ),
        (
            "dots",
            '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
            "</dots_function_call>",
            [PARIS_CALL],
        ),
        (
            "plamo3",
            "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>"
            "get_weather<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json"
            f"<|plamo:msg|>{PARIS}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
            "<|plamo:end_tool_requests:plamo|>",
            [PARIS_CALL],
        ),
        (
            "kimi_k3",
            '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
            'type="string"<|sep|>7<|close|>argument<|sep|>&amp;<|close|>argument<|sep|><|open|>argument key="a &amp; '
            '&quot;b&quot;" type="number"<|sep|>7<|close|>argument<|sep|><|close|>call<|sep|><|open|>call '
            'tool="get_weather" index="2"<|sep|><|open|>json type="object"<|sep|>{"city": "Paris"}<|close|>json<|sep|>'
            '<|close|>call<|sep|><|open|>call tool="get_time" index="3"<|sep|><|close|>call<|sep|>'
            "<|close|>tools<|sep|>",
            [
                ("get_weather", '{"city": "7<|close|>argument<|sep|>&amp;", "a & \\"b\\"": 7}'),
                PARIS_CALL,
                ("get_time", "{}"),
            ],
        ),
        (
            "minimax_m3",
            ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris'
            "]<]minimax[>[</city>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
            [PARIS_CALL],
        ),
        (
            "hy_v3",
            "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "</tool_call>\n<tool_call>get_time<tool_sep></tool_call>\n</tool_calls>",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        ("hy_v3", "<tool_call>get_time</tool_call>", [("get_time", "{}")]),
        (
            "hy_v3_opensource",
            "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
            "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n"
            "</tool_call:opensource>\n<tool_call:opensource>get_time<tool_sep:opensource></tool_call:opensource>\n"
            "</tool_calls:opensource>",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        (
            "minicpm5",
            '<function name="get_weather"><param name="city"><![CDATA[A <b>\n&amp; ]]></b>]]></param>'
            '<param name="days">2</param></function>\n<function name="get_time"></function>',
            [("get_weather", '{"city": "A <b>\\n&amp; ]]></b>", "days": 2}'), ("get_time", "{}")],
        ),
        (
            "minicpm5",
            "<functionname='get_weather'>\n  <paramname='city'>R&amp;D &lt;x></param>\n</function>",
            [("get_weather", '{"city": "R&D <x>"}')],
        ),
        (
            "minicpm5",
            '<function name="get_weather"><param name="city">\n<![CDATA[ Paris]]>\n</param></function>',
            [("get_weather", '{"city": " Paris"}')],
        ),
        ("minicpm5", '<function name="get_weather"><param name="city">Paris</function>', [PARIS_CALL]),
        (
            "muse",
            ' to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
            '<atem:parameter name="city">Paris</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eom|>'
            '<|start|>assistant to=get_time.get_time<|message|><atem:invoke name="get_time.get_time">\n</atem:invoke>',
            [PARIS_CALL, ("get_time", "{}")],
        ),
        (
            "k2_horizon",
            "<ifm|tool_calls><ifm|tool_call>get_weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_value>Paris"
            "</ifm|arg_value></ifm|tool_call>\n<ifm|tool_call>get_time</ifm|tool_call></ifm|tool_calls>",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        (
            "k2_horizon",
            "<ifm|tool_calls><ifm|tool_call>get_weather\n<ifm|arg_key>city</ifm|arg_key>\n<ifm|arg_type>string"
            "</ifm|arg_type>\n<ifm|arg_value>Paris</ifm|arg_value>\n<ifm|arg_key>id</ifm|arg_key><ifm|arg_type>String"
            "</ifm|arg_type><ifm|arg_value>7</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
            [("get_weather", '{"city": "Paris", "id": "7"}')],
        ),
        (
            "k2_horizon",
            f"<ifm|tool_calls><ifm|tool_call>{JSON_CALL}</ifm|tool_call>\n<ifm|tool_call>{JSON_CALL}</ifm|tool_call>"
            "</ifm|tool_calls>",
            [PARIS_CALL] * 2,
        ),
        (
            "step3",
            '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
            '<steptml:parameter name="city">Paris</steptml:parameter></steptml:invoke><｜tool_call_end｜>\n'
            '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_time"></steptml:invoke>'
            "<｜tool_call_end｜><｜tool_calls_end｜>",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        (
            "step3",
            '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="get_weather">\n'
            '<steptml:parameter name="city">Paris</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>'
            '<｜tool_sep｜><｜tool_call_begin｜><steptml:invoke name="get_time"/><｜tool_call_end｜>'
            "<｜tool_calls_end｜>",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        ("gigachat3", f"function call<|role_sep|>\n{JSON_CALL}", [PARIS_CALL]),
        (
            "solar_open",
            f"<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{PARIS}"
            "<|tool_call:end|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_time<|tool_call:args|>{}"
            "<|tool_call:end|><|calls|>",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        (
            "solar_open",
            f"<|tool_call:begin|>NOT-VALID<|tool_call:name|>get_weather<|tool_call:args|>{PARIS}<|tool_call:end|>",
            [PARIS_CALL],
        ),
        (
            "solar_open2",
            "<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end|>\n"
            "<|tool_arg:start|>days<|tool_arg:value|>2<|tool_arg:end|>\n<|tool_call:end|>\n"
            "<|tool_call:start|>get_time\n<|tool_call:end|>",
            [("get_weather", '{"city": "Paris", "days": 2}'), ("get_time", "{}")],
        ),
        (
            "solar_open2",
            "<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_call:end|>",
            [PARIS_CALL],
        ),
        ("functionary_v32", f"get_weather\n{PARIS}>>>get_time\n{{}}", [PARIS_CALL, ("get_time", "{}")]),
        ("functionary_v32", f">>>get_weather\n{PARIS}\n", [PARIS_CALL]),
        ("longcat", f"<longcat_tool_call>{JSON_CALL}</longcat_tool_call>", [PARIS_CALL]),
        (
            "internlm",
            f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {PARIS}}}<|action_end|>\n',
            [PARIS_CALL],
        ),
        ("granite-20b-fc", f"<function_call> {JSON_CALL}\n<function_call> {JSON_CALL}", [PARIS_CALL] * 2),
        ("gigachat3", f"<|function_call|>{JSON_CALL}", [PARIS_CALL]),
        (
            "seed_oss",
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
            "</seed:tool_call>\n<function=get_time>\n</function>\n</seed:tool_call>",
            [PARIS_CALL, ("get_time", "{}")],
        ),
        (
            "seed_oss",
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
            [PARIS_CALL],
        ),
        (
            "mimo",
            "<tool_call><function=get_weather><parameter=city>\nNull \n</parameter></function></tool_call>",
            [("get_weather", '{"city": "\\nNull \\n"}')],
        ),
        ("granite", f"<tool_call>[{JSON_CALL}]", [PARIS_CALL]),
        ("phi4_mini_json", f"<|tool_call|>[{JSON_CALL}, {JSON_CALL}]<|/tool_call|>", [PARIS_CALL] * 2),
        ("phi4_mini_json", f"functools[{JSON_CALL}]", [PARIS_CALL]),
        ("granite", f"<|tool_call|>[{JSON_CALL}]", [PARIS_CALL]),
        ("nemotron", f"<TOOLCALL>[{JSON_CALL}]</TOOLCALL>", [PARIS_CALL]),
        (
            "functiongemma",
            "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>",
            [("get_weather", '{"city":"Paris","days":2}')],
        ),
        (
            "gemma4",
            '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
            [("get_weather", '{"city":"Paris"}')],
        ),
        ("json", JSON_CALL, [PARIS_CALL]),
        ("json", f"```json\n{JSON_CALL}\n```", [PARIS_CALL]),
        ("json", f"```\n[{JSON_CALL},\n {JSON_CALL}]\n```", [PARIS_CALL] * 2),
        ("json", f'[{{"function": "get_weather", "parameters": {PARIS}}}]', [PARIS_CALL]),
        ("json", f"{JSON_CALL}\n{JSON_CALL}", [PARIS_CALL] * 2),
    ],
)
def test_calls_of_every_format(format_name: str, answer: str, calls: list) -> None:
    assert seen(parse_whole(parser(format_name), answer)) == (None, None, calls)
    assert seen(parse_pieces(parser(format_name), answer)) == (None, None, calls)


def test_every_format_is_in_the_table() -> None:
    table = test_calls_of_every_format.pytestmark[0].args[1]
    assert {known.name for known in TOOL_FORMATS} - {row[0] for row in table} == {"jamba", "functools"}
