"""What every route of one server shares."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Concatenate, ParamSpec, TypeVar

from jaxllm.chat.conversation import Conversation
from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.machine import cores
from jaxllm.mcp.servers import ToolServers
from jaxllm.mcp.settings import find_settings
from jaxllm.requests.structured_outputs import MAX_PROCESSES, end_compiling
from jaxllm.serving.access.audit import AuditLog
from jaxllm.serving.access.keys import Keys
from jaxllm.serving.access.limits import RateLimits
from jaxllm.serving.access.usage import Ledger
from jaxllm.serving.http.api_error import unavailable
from jaxllm.serving.http.json_body import BodyProcess
from jaxllm.serving.http.reading import BodyMemory
from jaxllm.serving.registry import Registry
from jaxllm.serving.served_model import Running, ServedModel

logger = logging.getLogger(__name__)

GRAMMAR_THREADS = 2 * MAX_PROCESSES
"""More than can compile at once, so that grammars which have been compiled pass those that have not."""
TEMPLATE_THREADS = 4
"""For requests with templates of their own, which may take seconds to render."""

P = ParamSpec("P")
R = TypeVar("R")


class ServerState:
    """The server's settings, its models, and what outlives a request.

    Raises ConfigError when a file or a store that the settings name cannot be used.
    """

    def __init__(self, config: ServerConfig, registry: Registry):
        self.config = config
        self.registry = registry
        self.leaving = False
        """Whether the server is to stop soon: it answers, and asks to be sent nothing more."""
        self.draining = False
        """Whether the server is stopping."""
        self.keys = Keys(config, [name for model in registry for name in model.names])
        self.limits = RateLimits(config.rate_limit_store)
        self.usage = Ledger()
        self.audit = None if config.audit_log is None else AuditLog(config.audit_log)
        self.bodies = BodyProcess(config.max_body_size)
        self.body_memory = BodyMemory(max(config.max_body_memory, config.max_body_size))
        self.tool_servers = ToolServers(find_settings(config.mcp_config)[1], result_limit=config.mcp_result_limit)
        """Begun and ended with the application."""
        self.created = int(time.time())
        self._workers = ThreadPoolExecutor(min(4, cores().usable), thread_name_prefix="jaxllm-tokenize")
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="jaxllm-bodies")
        self._grammar_workers = ThreadPoolExecutor(GRAMMAR_THREADS, thread_name_prefix="jaxllm-grammar")
        self._template_workers = ThreadPoolExecutor(TEMPLATE_THREADS, thread_name_prefix="jaxllm-templates")

    @property
    def running(self) -> set[Running]:
        """The requests under way."""
        return {request for model in self.registry.loaded for request in model.running}

    @property
    def is_ready(self) -> bool:
        """Whether requests to the models loaded at the start wait for no compile."""
        awaited = [model.served for model in self.registry if model.awaited and model.served is not None]
        return all(model.engine.is_dead or model.engine.stats().ready for model in awaited)

    def check_accepting(self) -> None:
        """Raises 503 when no new request can start, whatever model it asks for."""
        self.registry.check_alive()
        if self.draining:
            raise unavailable("the server is shutting down", code="shutting_down")

    def drain(self) -> None:
        """From now on no request begins."""
        self.leaving = self.draining = True
        self.registry.drain()

    async def offload(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run tokenizer or template work on a thread, so that nobody's stream waits for it."""
        return await self._call(self._workers, lambda: function(*args, **kwargs))

    async def offload_grammar(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for work that may compile a grammar, which takes seconds: only others like it wait for that."""
        return await self._call(self._grammar_workers, lambda: function(*args, **kwargs))

    async def prepare(
        self,
        work: Callable[Concatenate[ServedModel, Conversation, P], R],
        model: ServedModel,
        conversation: Conversation,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Run work that renders a conversation, in one call of a thread: only others like it wait for it."""
        workers = self._workers
        if conversation.rendering.chat_template is not None:
            workers = self._template_workers
        elif conversation.tools or conversation.structured_outputs is not None:
            workers = self._grammar_workers
        return await self._call(workers, lambda: work(model, conversation, *args, **kwargs))

    async def read_large(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same for what reads a large body, one at a time."""
        context = copy_context()
        return await self._call(self._readers, lambda: context.run(function, *args, **kwargs))

    async def _call(self, workers: ThreadPoolExecutor, function: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(workers, function)

    async def reload(self) -> None:
        """Read the files of keys and of tool servers again, and open the audit log again.

        What is wrong changes nothing but the log.
        """
        self.keys.reload()
        if self.audit is not None:
            self.audit.reopen()
        await self._reload_tool_servers()

    async def _reload_tool_servers(self) -> None:
        try:
            path, settings = await self.offload(find_settings, self.config.mcp_config)
        except ConfigError as error:
            logger.error("the tool servers stay as they are: %s", error)
            return
        logger.info("tool servers from %s: %s", path, ", ".join(one.label for one in settings) or "none")
        await self.tool_servers.reload(settings)

    async def close(self) -> None:
        await self.tool_servers.close()
        self.bodies.close()
        for workers in (self._workers, self._readers, self._grammar_workers, self._template_workers):
            workers.shutdown(wait=False, cancel_futures=True)
        if self.audit is not None:
            await asyncio.to_thread(self.audit.close)
        end_compiling()  # what runs on them now; the program's end would wait for it
