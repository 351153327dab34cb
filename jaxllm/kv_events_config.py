"""The settings of what an engine tells routers about its prefix cache."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field

from jaxllm.setting_values import SettingsGroup


def _check_endpoint(text: str) -> str:
    port = text.rpartition(":")[2]
    if not text.startswith(("tcp://", "ipc://")) or (text.startswith("tcp://") and not port.isdigit()):
        raise ValueError("it must be an address as tcp://*:5557 or ipc:///run/jaxllm/events")
    return text


Endpoint = Annotated[str, AfterValidator(_check_endpoint)]


class KVEventsConfig(SettingsGroup):
    """Events of the prefix cache over ZeroMQ, in vLLM's words: which pages can be found, and which no longer."""

    enable_kv_cache_events: bool = True
    """Tell of them; false changes nothing."""
    publisher: Literal["zmq", "null"] = "zmq"
    """How they are told; null tells nobody."""
    endpoint: Endpoint = "tcp://*:5557"
    """Where they are published. With * (or ipc://) subscribers connect to it; other addresses are connected to."""
    replay_endpoint: Endpoint | None = None
    """Where subscribers ask again for batches that they have missed, by the number of the first."""
    buffer_steps: Annotated[int, Field(ge=0)] = 10_000
    """How many batches are kept for that."""
    hwm: Annotated[int, Field(ge=0)] = 100_000
    """How many batches wait for a slow subscriber, which misses further ones."""
    max_queue_size: Annotated[int, Field(ge=1)] = 100_000
    """How many batches wait to be published; further ones are left out, and their numbers with them."""
    topic: str = ""
    """The first part of each message, as kv@10.0.0.5:8000@qwen3 for llm-d."""
    event_format: Literal["map", "array"] = "map"
    """How an event is written: by names, as vLLM does since 0.26, or by places, as before."""
    data_parallel_rank: Annotated[int, Field(ge=0)] = 0
    """Which of several engines tells; it is added to the ports. jaxllm sets it for engines and batches side by side."""

    @property
    def publishes(self) -> bool:
        """Whether anybody is told."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def of_rank(self, rank: int) -> Self:
        """The settings of one of several engines that are started with these."""
        return self.model_copy(update={"data_parallel_rank": self.data_parallel_rank + rank})

    def address(self, endpoint: str) -> str:
        """Where this rank publishes: the port, or the file's name, is its own."""
        if not self.data_parallel_rank:
            return endpoint
        if endpoint.startswith("ipc://"):
            return f"{endpoint}_dp{self.data_parallel_rank}"
        host, _, port = endpoint.rpartition(":")
        return f"{host}:{int(port) + self.data_parallel_rank}"
