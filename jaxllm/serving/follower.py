"""`jaxllm serve` in a process that follows another: it runs the steps that it is sent, and answers /health alone."""

from __future__ import annotations

import logging
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NoReturn

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.config import ServeConfig
from jaxllm.serving.http.connections import BoundedProtocol
from jaxllm.serving.http.listening import address, bind, make_context, scheme

if TYPE_CHECKING:
    from jaxllm.engine.scale.lockstep.meeting import Group

logger = logging.getLogger(__name__)


class Following(msgspec.Struct):
    """The body of /health."""

    status: Literal["loading", "ok"]
    process_id: int
    num_processes: int


@dataclass
class FollowingServer:
    """Answers /health on a thread from when all processes have come: 503 until this one can run steps."""

    config: ServeConfig
    ready: threading.Event = field(default_factory=threading.Event)

    def listen(self, group: Group) -> None:
        """Open the port. Of several processes on a machine each takes the next one after `port`."""
        port = self.config.port + group.place if self.config.port else 0
        listener = bind(self.config.host, port)
        app = Starlette(routes=[Route("/health", self._health)])
        settings = uvicorn.Config(
            app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False,
        )  # fmt: skip
        settings.load()
        settings.ssl = make_context(self.config)
        server = uvicorn.Server(settings)
        threading.Thread(target=server.run, args=([listener],), name="health", daemon=True).start()
        logger.info("/health is at %s; process 0 answers requests", address(listener, scheme(self.config)))

    async def _health(self, _: Request) -> Response:
        assert self.config.process_id is not None and self.config.num_processes is not None
        is_ready = self.ready.is_set()
        status: Literal["loading", "ok"] = "ok" if is_ready else "loading"
        body = Following(status, self.config.process_id, self.config.num_processes)
        return Response(msgspec.json.encode(body), 200 if is_ready else 503, media_type="application/json")


def serve_as_follower(config: ServeConfig) -> NoReturn:
    """Follow process 0 until it ends the group; the process ends with it.

    At SIGTERM or SIGINT the process stays for as long as a server's requests get to finish, for process 0 is most
    likely told to stop too and then ends the group in order. A second signal ends it at once.

    Raises ConfigError, ModelNotFoundError and CheckpointError as the server of process 0 would.
    """
    from jaxllm.engine.scale.lockstep.follower import Follower
    from jaxllm.engine.start.follow import follow
    from jaxllm.engine.start.leave import leave

    server = FollowingServer(config)
    asked: list[int] = []

    def begin(group: Group) -> None:
        server.listen(group)

        def stop(number: int, _: object) -> None:
            asked.append(number)
            if len(asked) > 1:
                leave(128 + number)
            assert isinstance(group.hold, Follower)
            group.hold.stop_within(config.lameduck + config.shutdown_timeout, signal.Signals(number).name)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)

    follow(config.of_model, begin, server.ready.set)
