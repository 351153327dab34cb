"""gpt-oss's answers: messages on channels, each `header<|message|>body<|end|>`.

A header names its channel and perhaps a recipient: `<|channel|>analysis`, or ` to=functions.name<|channel|>commentary
<|constrain|>json`; each but the first begins with `<|start|>assistant`. The analysis is reasoning, what goes to a known
function is a call of it, the rest is content.
"""

from __future__ import annotations

import re

from jaxllm.serving.parsing.calls import named_arguments
from jaxllm.serving.parsing.channels import MESSAGE, START, MessageReader
from jaxllm.serving.parsing.events import Content, Reasoning
from jaxllm.serving.parsing.source import Scan, any_left

_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_CUT_HEADER = re.compile(
    r"(<\|start\|>)?\w*( ?to=[^\s<]*)?(<\|channel\|>\w*)?( ?to=[^\s<]*)? ?(<\|constrain\|>\w*)?(<\|?\w*\|?)?"
)
_FUNCTIONS = "functions."
_NOBODY = "assistant"
"""A recipient that is no function; one of this name is functions.assistant."""


class Harmony(MessageReader):
    HEADERS = (START, "<|channel|>", "<|constrain|>", MESSAGE, "to=")
    LATE_HEADERS = ("<|channel|>",)
    ENDS = ("<|end|>", "<|return|>", "<|call|>")
    TEXT_ENDS = ENDS[:2]

    def is_cut_header(self, text: str) -> bool:
        return _CUT_HEADER.fullmatch(text) is not None

    def addressed(self, header: str) -> Scan[None]:
        channels, recipients = _CHANNEL.findall(header), _RECIPIENT.findall(header)
        recipient = recipients[-1] if recipients else _NOBODY
        name = recipient.removeprefix(_FUNCTIONS)
        if self.calls and recipient != _NOBODY and name in self.writer.schemas:
            yield from self.call(self._arguments(name))
        elif recipient != _NOBODY:
            yield from self.body(Content)
        else:
            self.source.kept.clear()
            yield from self.body(Reasoning if channels[-1:] == ["analysis"] else Content)

    def _arguments(self, name: str) -> Scan[None]:
        source, writer = self.source, self.writer
        if not (yield from any_left(source)) and not source.cut:  # <|call|> ended the answer
            writer.begin(name)
            writer.end()
        else:
            yield from named_arguments(source, writer, name, ends=self.ENDS)
