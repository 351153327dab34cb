"""Renders chat templates in a process of their own, which can be stopped.

Jinja's sandbox keeps a template from reaching anything, but neither from looping nor from building a text without end.
`python -m jaxllm.text.template_process` is such a process.
"""

from __future__ import annotations

import json
from typing import Any

from jaxllm.asked_process import AskedProcesses, Died, TimedOut, answer_questions
from jaxllm.errors import InvalidRequestError

RENDER_SECONDS = 10.0
"""Of processor time that one template may take, the start of its process included."""
MEMORY_BYTES = 256 * 2**20
MAX_PROMPT_CHARACTERS = 16 * 2**20

_TEXT, _PROBLEM = b"t", b"p"
"""What an answer begins with. A text is no JSON: to parse a long one would hold up the threads of who asked."""


def template_processes(most: int) -> AskedProcesses:
    """Processes that render templates: `question` says what they are asked, `rendered` reads what they answer."""
    return AskedProcesses("jaxllm.text.template_process", most=most)


def question(values: dict[str, Any]) -> bytes:
    """To render `jaxllm.text.chat_template.render(**values)`. Raises InvalidRequestError if they are no JSON values."""
    try:
        return json.dumps(values).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"messages are no JSON values: {error}", param="messages") from None


def rendered(answer: bytes) -> str:
    """The text. Raises InvalidRequestError if the template refuses, or makes a text that is too long."""
    if answer.startswith(_PROBLEM):
        raise InvalidRequestError(**json.loads(answer[1:]))
    return answer[1:].decode("utf-8", "surrogatepass")


class TemplateProcess:
    """One process, started when it is first needed and again after it was stopped; callers wait for each other."""

    def __init__(self, seconds: float = RENDER_SECONDS) -> None:
        self._seconds = seconds
        self.processes = template_processes(most=1)

    def render(self, values: dict[str, Any]) -> str:
        """`jaxllm.text.chat_template.render(**values)` of JSON values.

        Raises InvalidRequestError when the template refuses, or needs too much time, memory or text.
        """
        try:
            return rendered(self.processes.ask(question(values), processor_seconds=self._seconds))
        except TimedOut:
            limit = f"more than {self._seconds:g} seconds of processor time"
        except Died:
            limit = f"more than {MEMORY_BYTES:,} bytes of memory"
        raise InvalidRequestError(f"the chat template needs {limit} to render", param="chat_template")

    def close(self) -> None:
        """End the process; a later `render` starts another."""
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
