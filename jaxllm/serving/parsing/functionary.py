"""functionary v3.2's answers: messages to somebody, each a name, a newline and the body, with `>>>` between them.

What is for `all` is content; what is for a known function is the JSON text of its arguments. Prompts end with `>>>`, so
the first message begins without it.
"""

from __future__ import annotations

from typing import Any

from jaxllm.serving.parsing.calls import named_arguments
from jaxllm.serving.parsing.channels import MessageReader
from jaxllm.serving.parsing.events import Content
from jaxllm.serving.parsing.source import Scan, next_of, skip_space

SEPARATOR = ">>>"
_EVERYBODY = "all"


class Functionary(MessageReader):
    HEADERS = ()
    ENDS = ()
    TEXT_ENDS = ()

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        names = (_EVERYBODY, *(self.writer.schemas if self.calls else ()))
        self._headers = tuple(f"{name}\n" for name in names)
        self._later_headers = tuple(SEPARATOR + header for header in self._headers)
        self.also_ends = tuple(space + header for space in ("\n", "") for header in self._later_headers)
        self._first = True

    def is_cut_header(self, text: str) -> bool:
        headers = (*self._later_headers, *(self._headers if self._first else ()))
        return any(header.startswith(text) for header in headers)

    def message(self) -> Scan[None]:
        source = self.source
        yield from skip_space(source)
        header = yield from next_of(source, (*self._later_headers, *(self._headers if self._first else ())))
        rest = source.text[source.at :]
        if header:
            source.take(len(header))
            self._first = False
            yield from self.addressed(header)
        elif source.cut and self.is_cut_header(rest):
            source.take(len(rest))
        else:
            self._first = False
            yield from self.body(Content)

    def addressed(self, header: str) -> Scan[None]:
        source = self.source
        name = header.removeprefix(SEPARATOR).removesuffix("\n")
        if name == _EVERYBODY:
            source.kept.clear()
            yield from self.body(Content)
        else:
            yield from self.call(named_arguments(source, self.writer, name))
            yield from skip_space(source)
            source.kept.clear()
