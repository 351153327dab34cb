"""Muse's answers: messages to somebody, each `to=NAME<|message|>body` and `<|eom|>`, or `<|eot|>` at the answer's end.

What the model writes to itself is reasoning, what it writes to the user or as commentary content, what goes to the
developer is shown to nobody; a message to a tool holds calls between tags. Each message but the first begins with
`<|start|>assistant`; models leave that out, and the end of the message before.
"""

from __future__ import annotations

import re
from typing import Any

from jaxllm.serving.parsing.channels import MESSAGE, START, MessageReader
from jaxllm.serving.parsing.events import Content, Reasoning
from jaxllm.serving.parsing.invocations import invoked_calls
from jaxllm.serving.parsing.source import Scan, literal, skip_space

ATEM = "atem:"
"""What the names of the tags begin with."""
ATEM_CALLS, ATEM_CALLS_END = f"<{ATEM}function_calls>", f"</{ATEM}function_calls>"
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CUT_HEADER = re.compile(r"(<\|start\|>)?\w*( ?to=[^\s<]*)?(<\|?\w*\|?)?")
_KINDS = {"self": Reasoning, "user": Content, "commentary": Content, "developer": None}


class Muse(MessageReader):
    HEADERS = (START, MESSAGE, "to=")
    ENDS = ("<|eom|>", "<|eot|>")
    TEXT_ENDS = ENDS

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        tools = [form for name in self.writer.schemas for form in (name, f"{name}.{name}")]
        headers = [f"to={recipient}{MESSAGE}" for recipient in (*_KINDS, *tools)]
        self.also_ends += tuple(space + header for space in (" ", "") for header in headers)

    def is_cut_header(self, text: str) -> bool:
        return _CUT_HEADER.fullmatch(text) is not None

    def addressed(self, header: str) -> Scan[None]:
        recipients = _RECIPIENT.findall(header)
        recipient = recipients[-1] if recipients else "self"
        if recipient in _KINDS:
            self.source.kept.clear()
            yield from self.body(_KINDS[recipient])
        elif self.calls:
            yield from self.call(self._calls())
        else:
            yield from self.body(Content)

    def _calls(self) -> Scan[None]:
        source = self.source
        yield from literal(source, ATEM_CALLS)
        yield from skip_space(source)
        yield from invoked_calls(
            source, self.writer, prefix=ATEM, end=ATEM_CALLS_END, doubled=True, after=(*self.ENDS, *self.also_ends)
        )
