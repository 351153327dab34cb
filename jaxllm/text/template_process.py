"""Renders chat templates of strangers in processes of their own, which can be stopped.

Jinja's sandbox keeps a template from reaching anything, but neither from looping nor from building a text without end.
`python -m jaxllm.text.template_process` is such a process.
"""

from __future__ import annotations

import json
from typing import Any

from jaxllm.errors import InvalidRequestError
from jaxllm.own_process import AskedProcesses, Died, TimedOut, answer_questions

RENDER_SECONDS = 5.0  # of processor time that one template may take, the start of its process included
MAX_PROCESSES = 2
MEMORY_BYTES = 256 * 2**20
MAX_PROMPT_CHARACTERS = 16 * 2**20

_TEXT, _PROBLEM = b"t", b"p"
"""The first byte of an answer. A text is no JSON: parsing a long one would hold up the threads that asked."""


class TemplateProcesses:
    """MAX_PROCESSES, started when they are first needed and again after they were stopped; callers wait for one."""

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds`, instead of RENDER_SECONDS, is what one template may take."""
        self._seconds = seconds
        self.processes = AskedProcesses("jaxllm.text.template_process", most=MAX_PROCESSES)

    def render(self, values: dict[str, Any]) -> str:
        """`jaxllm.text.chat_template.render(**values)`, bounded. Raises InvalidRequestError as that, or past it."""
        from jaxllm.text.chat_template import json_text  # it loads jinja2

        seconds = RENDER_SECONDS if self._seconds is None else self._seconds
        try:
            answer = self.processes.ask(json_text(values).encode(), processor_seconds=seconds)
            if answer.startswith(_PROBLEM):
                raise InvalidRequestError(**json.loads(answer[1:]))
            return answer[1:].decode("utf-8", "surrogatepass")
        except TimedOut:
            limit = f"more than {seconds:g} seconds of processor time"
        except Died:
            limit = f"more than {MEMORY_BYTES:,} bytes of memory"
        raise InvalidRequestError(f"the chat template needs {limit} to render", param="chat_template")

    def close(self) -> None:
        self.processes.close()


def _answer(asked: bytes) -> bytes:
    from jaxllm.text.chat_template import render  # here, so that who starts this process needs no jinja2

    try:
        text = render(**json.loads(asked))
        if len(text) > MAX_PROMPT_CHARACTERS:
            problem = (
                f"the chat template makes a prompt of {len(text)} characters; accepted are {MAX_PROMPT_CHARACTERS}"
            )
            raise InvalidRequestError(problem, param="chat_template")
    except InvalidRequestError as error:
        return _PROBLEM + json.dumps({"message": str(error), "param": error.param}).encode()
    return _TEXT + text.encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    answer_questions(_answer, MEMORY_BYTES)
