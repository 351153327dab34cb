"""Settings that have settings of their own: drafts, events of the prefix cache, transfers of KV pages, adapters."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address, ip_network
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from jaxllm.config.values import NameList, Seconds, ServedName, SettingsGroup, must_be, parse_named_paths

MTP_NAMES = ("qwen3_next_mtp", "qwen3_5_mtp", "deepseek_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp")
"""What vLLM also calls the method of the models whose modules are supported."""
_AS_THE_MODEL = {
    "enforce_eager", "draft_tensor_parallel_size", "attention_backend", "moe_backend", "quantization", "max_model_len",
    "draft_sample_method", "rejection_sample_method", "disable_padded_drafter_batch", "parallel_drafting",
}  # fmt: skip
"""Settings of vLLM's that say how drafts are computed, and not which."""
logger = logging.getLogger(__name__)


class SpeculativeConfig(SettingsGroup):
    """How tokens are drafted that a step tries ahead, in vLLM's words."""

    method: Literal["ngram", "suffix", "draft_model", "mtp", "eagle3"] | None = None
    """ngram: what followed in the request's own text the last time that it said what it has just said. suffix: in the
    answers of earlier requests as well. draft_model: what a smaller model says next. mtp: what the module says that the
    model's own checkpoint has for predicting further tokens. eagle3: what an EAGLE-3 head says that was trained for the
    model. By default draft_model where there is a model, ngram elsewhere."""
    model: str | None = None
    """The draft model or the head, named as `model` of the engine is; it must have the same vocabulary."""
    revision: str | None = None
    """Branch, tag or commit of the draft model's hub repository."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=15)]
    """How many tokens are tried ahead."""
    prompt_lookup_min: Annotated[int, Field(ge=1, le=16)] | None = None
    """The shortest match that is good enough, in tokens; by default prompt_lookup_max."""
    prompt_lookup_max: Annotated[int, Field(ge=1, le=16)] | None = None
    """The longest match that is looked for, in tokens; by default prompt_lookup_min, and 5 without either."""
    remembered_tokens: Annotated[int, Field(ge=0, le=2**20)] | None = None
    """How many tokens of other texts are looked through: of those that requests predict (by default 4,096), and with
    suffix of the answers of earlier requests as well (32,768)."""

    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
    """Other depths where many requests run, as [[1, 8, 4], [9, 32, 2], [33, 4096, 0]]: first, last, tokens."""

    @model_validator(mode="before")
    @classmethod
    def _as_the_model_runs(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name in sorted(_AS_THE_MODEL & given.keys()):
            logger.warning("speculative_config.%s has no effect: drafts are computed as the model itself is", name)
        return {name: value for name, value in given.items() if name not in _AS_THE_MODEL}

    @field_validator("method", mode="before")
    @classmethod
    def _of_vllm(cls, method: object) -> object:
        return "mtp" if isinstance(method, str) and method in MTP_NAMES else method

    @property
    def source(self) -> Literal["ngram", "suffix", "draft_model", "mtp", "eagle3"]:
        return self.method or ("ngram" if self.model is None else "draft_model")

    @property
    def shortest(self) -> int:
        return self.prompt_lookup_min or self.longest

    @property
    def longest(self) -> int:
        return self.prompt_lookup_max or self.prompt_lookup_min or 5

    @property
    def remembered(self) -> int:
        default = 32_768 if self.source == "suffix" else 4_096
        return default if self.remembered_tokens is None else self.remembered_tokens

    def _faults(self) -> Iterator[str]:
        drafts_by_model = self.source in ("draft_model", "eagle3")
        if drafts_by_model and self.model is None:
            yield f'model is missing: method "{self.source}" takes the name of a model or a folder'
        meaningless: tuple[str, ...] = () if drafts_by_model else ("model", "revision")
        if drafts_by_model or self.source == "mtp":  # which look for no drafts in texts
            meaningless += ("prompt_lookup_min", "prompt_lookup_max", "remembered_tokens")
        for name in meaningless:
            if getattr(self, name) is not None:
                yield f'{name} means nothing with method "{self.source}": leave it out'
        if self.shortest > self.longest:
            yield f"prompt_lookup_min is {self.shortest}: at most prompt_lookup_max, which is {self.longest}"
        before = 0
        for first, last, most in self.num_speculative_tokens_per_batch_size or ():
            if not before < first <= last or not 0 <= most <= self.num_speculative_tokens:
                yield (
                    f"num_speculative_tokens_per_batch_size holds {[first, last, most]}: accepted are [first, last, "
                    f"tokens] in ascending order, with 0 to num_speculative_tokens tokens"
                )
            before = last


_ENDPOINT = re.compile(r"tcp://.*:\d+|ipc://.*")
Endpoint = Annotated[str, must_be("be an address as tcp://*:5557 or ipc:///run/jaxllm/events", _ENDPOINT.fullmatch)]


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


Address = Annotated[
    str,
    must_be(
        "be an address at which other servers reach this machine, such as 10.0.0.5",
        lambda text: text not in ("", "0.0.0.0", "::", "*"),
    ),
]


class KVTransferConfig(SettingsGroup):
    """How KV pages go from the server that computes a prompt to the one that goes on with it, in vLLM's words."""

    kv_connector: Literal["jaxllm"] = "jaxllm"
    """How pages travel: there is one way, over TCP."""
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"]
    """kv_producer: other servers fetch the pages of prompts that were computed here. kv_consumer: this server fetches
    pages from others. kv_both: either, by the request."""
    kv_ip: Address = "127.0.0.1"
    """The address of this machine at which a producer listens, and that others are told to fetch pages from."""
    kv_port: Annotated[int, Field(ge=0, le=65535)] = 14579
    """The port for that; 0 takes a free one."""
    kv_timeout: Annotated[Seconds, Field(gt=0, le=3600)] = 30.0
    """Seconds after which a request no longer waits for pages from another server."""
    kv_load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What becomes of a request whose pages cannot be fetched: its prompt is computed here, or it fails."""
    kv_peers: NameList = ()
    """Hosts and networks that requests may have pages fetched from, as prefill-1,10.0.0.0/8 (default: any)."""

    @property
    def gives(self) -> bool:
        return self.kv_role != "kv_consumer"

    @property
    def takes(self) -> bool:
        return self.kv_role != "kv_producer"


def is_peer(host: str, peers: tuple[str, ...]) -> bool:
    """Whether a host is one of `peers`, by its name or address, or in one of those that are networks; any, of none."""
    for peer in peers:
        with suppress(ValueError):  # one of the two is a name
            if ip_address(host) in ip_network(peer):
                return True
    return not peers or host in peers


class LoRAModule(SettingsGroup):
    """A LoRA adapter that a server has from the start, in vLLM's words."""

    name: ServedName
    """What requests call it, as their model."""
    path: Annotated[str, Field(min_length=1)]
    """A folder that PEFT saved, a GGUF adapter, or a hub id."""
    base_model_name: str | None = None
    """What listings call its model; by default the model's own name."""
    scale: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """What its effect is multiplied by."""


ADAPTER_LISTS = ("lora_modules", "adapters")
"""What the adapters of a model are called: by its flag, and in a file of several models."""
LoRAModules = Annotated[tuple[LoRAModule, ...], BeforeValidator(parse_named_paths)]
