"""Renders chat templates in processes of `jaxllm.text.template_process`, without blocking the event loop."""

from __future__ import annotations

from typing import Any

import msgspec

from jaxllm.asked_process import Died, TimedOut
from jaxllm.errors import InvalidRequestError
from jaxllm.text.template_process import rendered, template_processes

RENDER_SECONDS = 5.0
"""Of processor time that one template may take, the start of its process included."""
MAX_PROCESSES = 2


class TemplateProcesses:
    """At most MAX_PROCESSES at once; whoever waits for one holds up nobody else."""

    def __init__(self) -> None:
        self._processes = template_processes(MAX_PROCESSES)

    async def render(self, values: dict[str, Any]) -> str:
        """`jaxllm.text.chat_template.render(**values)`, stopped after RENDER_SECONDS.

        Raises InvalidRequestError when the template is wrong, takes too long, or needs too much memory.
        """
        try:
            question = msgspec.json.encode(values)
            return rendered(await self._processes.ask_from_loop(question, processor_seconds=RENDER_SECONDS))
        except TimedOut:
            problem = f"takes more than {RENDER_SECONDS:g} seconds of processor time"
        except Died:
            problem = "needs too much memory"
        raise InvalidRequestError(f"chat_template {problem} to render", "chat_template")

    async def close(self) -> None:
        """End the processes; what they render now is refused."""
        self._processes.close()
