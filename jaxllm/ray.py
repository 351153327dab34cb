"""A server whose engines are replicas on Ray Serve: `jaxllm serve --ray`, or Ray's own commands.

    serve run jaxllm.ray:app model=smollm2-135m num_replicas=2

Ray's HTTP proxy hands each request to a `RayFront`, which reads it and passes it on to the `RayReplica` that Ray's
router chooses. A replica is a whole server of ours without a port; all routes are its own. See docs/scale.md.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import threading
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec
import ray
from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect
from starlette.types import Message

from jaxllm.config import ServeConfig
from jaxllm.config.server import ServerConfig
from jaxllm.config.sources import read_settings
from jaxllm.errors import ConfigError, EngineDeadError, QueueFullError, one_line
from jaxllm.serving.app import create_app, find_route
from jaxllm.serving.http.answers import error_response, to_api_error
from jaxllm.serving.http.json_body import BodyMemory
from jaxllm.serving.http.relay import RelayedAnswer, RelayedRequest, WholeAnswer, answer
from jaxllm.serving.http.route import FORM_OVERHEAD
from jaxllm.serving.metrics import merged
from jaxllm.serving.served_model import stopped
from jaxllm.serving.server import check_settings, configure_logging, warn_of_open_doors
from jaxllm.serving.status import monitoring
from jaxllm.sharding import nvidia
from jaxllm.wording import did_you_mean

logger = logging.getLogger(__name__)

AFFINITY_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
AFFINITY_SETTINGS = {"imbalanced_threshold": 4, "do_eviction": True}
"""Ray's own defaults never give up a prefix for balance, and keep all texts for good."""
AFFINITY_CHARACTERS = 100_000
"""The beginning of a prompt by which replicas are compared."""
FRONT_OPTIONS: dict[str, Any] = {"max_ongoing_requests": 4096, "ray_actor_options": {"num_cpus": 0}}
REPLICA_OPTIONS: dict[str, Any] = {"max_ongoing_requests": 256, "health_check_period_s": 1}
"""What we have other defaults for than Ray, whose 5 requests at once would leave an engine idle."""
READY_POLL_SECONDS = 0.1

FOR_ALL = frozenset({
    "/sleep", "/wake_up", "/pause", "/resume", "/reset_prefix_cache", "/update_weights", "/load_lora_adapter",
    "/unload_lora_adapter", "/lora-adapters", "/models/load", "/models/unload",
})  # fmt: skip
"""Routes whose POST changes what an engine is: all replicas that run get it."""

OF_THE_PROXY = (
    "host", "port", "uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs", "lameduck",
    "shutdown_timeout",
)  # fmt: skip
"""Settings of a server that listens, and stops, by itself."""
OF_A_GROUP = ("multi_process", "num_processes", "process_id", "coordinator_address")
NAMESPACE, APPLICATION = "serve", "default"
"""What `serve run` calls them, so that Ray's other commands find ours too."""


def run_on_ray(config: ServeConfig) -> None:
    """Start Ray Serve and the replicas, and wait until SIGINT or SIGTERM; returns when all requests have ended.

    Ray is the one that RAY_ADDRESS names, or one of this process's own. A second signal ends all. Raises ConfigError.
    """
    configure_logging(config)
    warn_of_open_doors(config)
    if config.port == 0:
        raise ConfigError("port is 0, and Ray's proxies, one on each machine, all listen at the same: name one")
    running = application(config, proxy=("host", "port"))
    ray.init(namespace=NAMESPACE)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        serve.start(proxy_location="EveryNode", http_options={"host": config.host, "port": config.port})
        serve.run(running, name=APPLICATION)
        logger.info("Ray's proxy serves %s at http://%s:%d/v1", ", ".join(config.names), config.host, config.port)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
        logger.info("stopping; running requests may finish")
        serve.delete(APPLICATION)
    except RuntimeError as error:
        raise ConfigError(f"Ray could not start the replicas: {_cause(error)}") from None
    finally:
        serve.shutdown()
        ray.shutdown()


def application(config: ServeConfig, proxy: Collection[str] = ()) -> serve.Application:
    """The front and its replicas; settings in `proxy` are honoured elsewhere. Raises ConfigError."""
    for name in OF_THE_PROXY:
        if name in config.model_fields_set and name not in proxy:
            raise ConfigError(
                f"{name} is {getattr(config, name)}, and Ray's proxy listens here: its http_options say where, and "
                "graceful_shutdown_timeout_s in replica_options says how long requests have when a replica stops"
            )
    for name in OF_A_GROUP:
        if name in config.model_fields_set:
            raise ConfigError(f"{name} is {getattr(config, name)}; a replica on Ray is one process, with all its GPUs")
    replicas = _replicas(config).bind(config)
    front = serve.deployment(RayFront).options(**FRONT_OPTIONS)
    return front.bind(replicas, config.of_server, config.prefix_affinity)


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """The application, for `serve run` and for the files of `serve deploy`. Raises ConfigError.

    Args:
        arguments: the fields of ServeConfig, over JAXLLM_… variables, over the YAML file that `config` names.
    """
    given = {"ray": True, **arguments}
    path = given.pop("config", None)
    for name in given:
        if name not in ServeConfig.model_fields:
            raise ConfigError(f"unknown argument {name!r}{did_you_mean(name, ServeConfig.model_fields)}")
    config = read_settings(ServeConfig, given, None if path is None else Path(path), as_flag=lambda name: name)
    if not config.ray:
        raise ConfigError("ray is False, and this is the application that runs on Ray: leave it out")
    return application(config)


def _cause(error: RuntimeError) -> str:
    """What a replica has raised, by the traceback that Ray's status of its deployment has; else what Ray says."""
    status = serve.status().applications.get(APPLICATION)
    deployed = [] if status is None else [one.message for one in status.deployments.values()]
    lines = [line.strip() for text in (*deployed, str(error)) for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if re.match(r"jaxllm\.errors\.\w+: ", line)]
    return one_line(ours[-1].partition(": ")[2] if ours else lines[-1])


def _replicas(config: ServeConfig) -> serve.Deployment:
    own = dict(REPLICA_OPTIONS)
    if config.num_replicas is not None:
        own["num_replicas"] = config.num_replicas
    if config.prefix_affinity:
        own["request_router_config"] = {
            "request_router_class": AFFINITY_ROUTER,
            "request_router_kwargs": AFFINITY_SETTINGS,
        }
    chosen = config.replica_options or {}
    for name in ("num_replicas", "request_router_config"):
        if name in chosen and name in own:
            raise ConfigError(f"{name} is in replica_options, and a setting of its own says the same: give one of them")
    try:
        return serve.deployment(RayReplica).options(**own | chosen)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"replica_options is {chosen}: {' '.join(str(error).split())}") from None


class RayReplica:
    """A server without a port, with its engines and routes. Raises as `jaxllm serve` when it is made."""

    async def __init__(self, config: ServeConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        self._open = AsyncExitStack()
        configure_logging(config)
        _check_gpus()
        async with AsyncExitStack() as opened:
            models = check_settings(config)
            opened.push_async_callback(asyncio.to_thread, models.shutdown)
            registry = await asyncio.to_thread(models.start)
            self._app = create_app(config.of_server, registry)
            self._state = self._app.state.server
            await opened.enter_async_context(self._app.router.lifespan_context(self._app))
            loop = asyncio.get_running_loop()
            opened.enter_context(monitoring(config.of_server, lambda: self._app, lambda: loop))
            while not self._state.is_ready:
                await asyncio.sleep(READY_POLL_SECONDS)
            self._open = opened.pop_all()

    def check_health(self) -> None:
        """Raises EngineDeadError while no engine runs; Ray replaces a replica that has raised three times."""
        self._state.registry.check_alive()

    async def answer(
        self, hint: RoutingHint | None = None, *, request: RelayedRequest
    ) -> AsyncGenerator[list[Message], None]:
        """The answer to a request, see `relay.answer`. The hint is for Ray's router."""
        async with aclosing(answer(self._app, request)) as messages:
            async for some in messages:
                yield some

    async def answer_whole(self, *, request: RelayedRequest) -> tuple[str, WholeAnswer]:
        """Ray's name for this replica, and its answer."""
        return serve.get_replica_context().replica_id.unique_id, await WholeAnswer.to(self._app, request)

    async def __del__(self) -> None:
        """Ray calls it once, when the requests under way have ended or their time is over."""
        if hasattr(self, "_state"):
            self._state.drain()
            for request in self._state.running:
                request.abort(stopped())
        await self._open.aclose()


def _check_gpus() -> None:
    """Raises ConfigError where Ray hides the GPUs of this machine: the model would run on the CPU, and nobody know."""
    if "cpu" in os.environ.get("JAX_PLATFORMS", "") or not nvidia.hidden():
        return
    if nvidia.installed_cuda() is not None and nvidia.driver_version() is not None:
        raise ConfigError(
            'this replica has none of the GPUs here: set replica_options to {"ray_actor_options": {"num_gpus": 1}}, or '
            "JAX_PLATFORMS to cpu"
        )


class RoutingHint(msgspec.Struct):
    """What Ray's prefix router looks for among the arguments of a call."""

    prompt: str


class RayFront:
    """Takes requests from Ray's proxy and passes them on; no engine, and no JAX, is in its process."""

    def __init__(self, replicas: DeploymentHandle, config: ServerConfig, hints: bool):
        self._replicas = replicas
        self._answer = replicas.options(method_name="answer", stream=True)
        self._config = config
        largest = max(config.max_body_size, config.max_file_size + FORM_OVERHEAD)
        self._body_memory = BodyMemory(max(config.max_body_memory, largest))
        self._hints = hints

    async def __call__(self, request: Request) -> Response:
        route = find_route(request.scope)
        as_error = getattr(route, "error_response", error_response)
        as_event = getattr(route, "error_event", bytes)

        def lost(error: Exception) -> bytes | None:
            ours = _as_ours(error)
            return None if ours is error else as_event(bytes(as_error(to_api_error(ours)).body))

        try:
            is_upload = request.url.path.rstrip("/").endswith("/files")
            body_limit = self._config.max_file_size + FORM_OVERHEAD if is_upload else self._config.max_body_size
            with self._body_memory.share() as share:
                relayed = await RelayedRequest.read(request, body_limit, share)
            path = getattr(route, "path", request.scope["path"].removeprefix(request.scope.get("root_path", "")))
            if path == "/metrics" or (path in FOR_ALL and request.method == "POST"):
                return await self._ask_all(relayed, merges=path == "/metrics")
            messages = self._ask(relayed)
            return RelayedAnswer(await anext(messages), messages, lost)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            ours = _as_ours(error)
            shown = to_api_error(ours)
            if shown.status == 500:
                logger.exception("%s %s", request.method, request.url.path)
            refused: Response = as_error(shown)
            return refused

    async def _ask(self, request: RelayedRequest) -> AsyncGenerator[list[Message], None]:
        hint = _hint(request.body) if self._hints else None
        answering = self._answer.remote(*([] if hint is None else [hint]), request=request)
        try:
            async for messages in answering:
                yield messages
        finally:
            answering.cancel()  # does nothing once it is complete

    async def _ask_all(self, request: RelayedRequest, *, merges: bool) -> Response:
        answers: dict[str, WholeAnswer] = dict(
            await self._replicas.broadcast("answer_whole", request=request).results_async()
        )
        worst = max(answers.values(), key=lambda one: one.status)
        if merges and worst.status == 200:
            text = merged({name: one.body.decode() for name, one in answers.items()})
            return Response(text, media_type=CONTENT_TYPE_LATEST)
        return worst.response()


def _as_ours(error: Exception) -> Exception:
    match error:
        case RayActorError():
            return EngineDeadError("the replica that ran this request has died; another one takes its place")
        case DeploymentUnavailableError():
            return EngineDeadError("no replica could be started")
        case BackPressureError():
            return QueueFullError(f"{error.message} Retry later")
    return error


class _Prompted(msgspec.Struct):
    messages: Any = None
    prompt: Any = None
    input: Any = None
    system: Any = None


def _hint(body: bytes) -> RoutingHint | None:
    """The prompt of a request as far as replicas are compared by it; None where it has none."""
    try:
        found = msgspec.json.decode(body, type=_Prompted)
    except (msgspec.DecodeError, RecursionError):
        return None
    text = "".join(map(_text, (found.system, found.messages, found.prompt, found.input)))
    return RoutingHint(text[:AFFINITY_CHARACTERS]) if text else None


def _text(value: Any, depth: int = 4) -> str:
    """All that a prompt says: texts, token ids, and the texts of messages and of their parts."""
    match value:
        case str():
            return value
        case int():
            return f"{value} "
        case list() if depth:
            return "".join(_text(item, depth - 1) for item in value)
        case dict() if depth:
            return _text(value.get("content", value.get("text")), depth - 1)
    return ""
