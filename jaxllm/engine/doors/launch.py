"""Start an engine the way its config asks: in a thread here, or in a process of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxllm.config import EngineConfig
from jaxllm.engine.doors.keeper import Keeper
from jaxllm.engine.messages import EngineClient
from jaxllm.engine.scale.routing import Policy, prefix_first
from jaxllm.engine.start.room import MemoryRoom
from jaxllm.engine.start.tokenizer import resolve_tokenizer
from jaxllm.errors import ConfigError
from jaxllm.requests.logits_processors import LogitsProcessor
from jaxllm.sharding.clusters import settled
from jaxllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from jaxllm.engine.doors.replicas import Replicas


def start_engine(
    config: EngineConfig,
    given_up: threading.Event | None = None,
    room: MemoryRoom | None = None,
    keeper: Keeper | None = None,
    processors: Sequence[LogitsProcessor] = (),
) -> tuple[EngineClient, Tokenizer | None]:
    """A running engine, and the tokenizer its front door needs; see `start_client`.

    In a process that follows another it does not return: the process ends when the other does.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: it could not start.
    """
    config = settled(config)
    if config.process_id:
        from jaxllm.engine.start.follow import follow

        follow(config)
    client = start_client(config, given_up, room, keeper, processors)
    try:
        return client, resolve_tokenizer(config)
    except BaseException:
        client.shutdown()
        raise


def start_client(
    config: EngineConfig,
    given_up: threading.Event | None = None,
    room: MemoryRoom | None = None,
    keeper: Keeper | None = None,
    processors: Sequence[LogitsProcessor] = (),
) -> EngineClient:
    """A running engine; in a process of its own, `given_up` ends a start under way. Raises as `start_engine`.

    With `room` it asks for its place in memory, see there. `keeper` is where it may leave its weights, and find those
    of an engine before it. `processors` are functions of logits that requests may use.
    """
    if processors and (config.engine_process or config.num_engines > 1 or config.in_group):
        raise ConfigError(
            "logits_processors are functions, which reach only an engine in this process: engine_process must be "
            "False, and data_parallel_size and num_processes 1"
        )
    if config.num_engines > 1:
        return start_replicas(config, given_up, keeper)
    if config.engine_process:
        from jaxllm.engine.doors.process_client import ProcessClient

        return ProcessClient(config, given_up=given_up, room=room, keeper=keeper)
    if config.numa_node is not None:
        raise ConfigError(
            f"numa_node is {config.numa_node}: a process keeps to a node, and this engine has none of its own; set "
            "engine_process to true"
        )
    from jaxllm.engine.doors.thread_client import ThreadClient
    from jaxllm.engine.start.build import build_core

    core, info = build_core(config, room, processors=processors)
    return ThreadClient(core, info)


def start_replicas(
    config: EngineConfig,
    given_up: threading.Event | None = None,
    keeper: Keeper | None = None,
    policy: Policy = prefix_first,
) -> Replicas:
    """Running engines, config.data_parallel_size of them; `policy` says which request goes where.

    All of them take the weights that `keeper` has, which is empty afterwards.
    """
    from jaxllm.engine.doors.process_client import ProcessClient
    from jaxllm.engine.doors.replicas import Replicas
    from jaxllm.engine.doors.share import Share

    count = config.data_parallel_size
    if not config.engine_process:
        raise ConfigError(f"data_parallel_size is {count}: each engine has a process of its own, see engine_process")

    def start(number: int, given_up: threading.Event) -> ProcessClient:
        events = config.kv_events_config
        own = {"data_parallel_size": 1, "kv_events_config": None if events is None else events.of_rank(number)}
        one = config.model_copy(update=own)
        return ProcessClient(one, given_up=given_up, keeper=keeper, share=Share(number, count))

    replicas = Replicas(count, start, given_up=given_up, policy=policy)
    if keeper is not None:
        keeper.clear()
    return replicas
