"""Batches arrive as vLLM's subscribers expect them, and again for who missed some."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from jaxllm import LLM, SamplingParams
from jaxllm.config import EngineConfig, make_config
from jaxllm.config.parts import KVEventsConfig
from jaxllm.engine.core.request import root_of
from jaxllm.engine.scale.kv_events import END, BlockRemoved, BlockStored, EventPublisher
from jaxllm.errors import ConfigError
from tests.engine.scale.kv_events.subscriber import Subscriber
from tests.engine.scale.kv_events.test_events import prefixes_of
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS, few_pages

MILLISECONDS = 20_000


@pytest.fixture
def socket() -> Iterator[Any]:
    """One that hears everything, at an address that publishers connect to."""
    found = zmq.Context.instance().socket(zmq.SUB)
    found.setsockopt(zmq.SUBSCRIBE, b"kv@")
    found.setsockopt(zmq.RCVTIMEO, MILLISECONDS)
    yield found
    found.close(linger=0)


def listening(socket: Any) -> str:
    return f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"


def heard(socket: Any) -> tuple[int, list[Any]]:
    topic, number, batch = socket.recv_multipart()
    assert topic == b"kv@here@tiny" and len(number) == 8
    return int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)


@pytest.mark.parametrize("event_format", ["map", "array"])
def test_batches_are_numbered_and_can_be_had_again(socket: Any, tmp_path: Path, event_format: Any) -> None:
    replay = f"ipc://{tmp_path}/replay"
    config = KVEventsConfig(
        endpoint=listening(socket), replay_endpoint=replay, topic="kv@here@tiny", event_format=event_format,
        buffer_steps=2, data_parallel_rank=0,
    )  # fmt: skip
    publisher = EventPublisher(config)
    try:
        first = 0
        while not socket.poll(100):  # a publisher leaves out who is not there yet
            publisher.publish([BlockRemoved([first])])
            first += 1
        for number in (first, first + 1, first + 2):
            publisher.publish([BlockStored([number], None, [1, 2], 2), BlockRemoved([7])])
        number, batch = heard(socket)
        while number < first:
            number, batch = heard(socket)
        assert number == first and batch[2] == 0 and isinstance(batch[0], float)
        if event_format == "map":
            assert batch[1][0]["type"] == "BlockStored" and batch[1][0]["block_hashes"] == [first]
        else:
            assert batch[1] == [
                ["BlockStored", [first], None, [1, 2], 2, None, "GPU", None],
                ["BlockRemoved", [7], "GPU"],
            ]
        assert [heard(socket)[0] for _ in range(2)] == [first + 1, first + 2]
        asker = zmq.Context.instance().socket(zmq.DEALER)
        asker.setsockopt(zmq.RCVTIMEO, MILLISECONDS)
        asker.connect(f"{replay}")
        asker.send_multipart([b"", (0).to_bytes(8, "big")])
        again = [asker.recv_multipart()[1:] for _ in range(3)]
        asker.close(linger=0)
        assert [int.from_bytes(one[0], "big") for one in again[:2]] == [first + 1, first + 2], "the last two are kept"
        assert again[2] == [END, b""]
        assert msgspec.msgpack.decode(again[1][1])[2] == 0
    finally:
        publisher.close()


def test_an_engine_tells_what_it_has_cached(socket: Any, tmp_path: Path) -> None:
    """With few pages, so that prompts lose theirs, and after a reset."""
    model = str(write_checkpoint("llama_gqa", tmp_path / "m"))
    events = {"endpoint": listening(socket), "topic": "kv@here@tiny"}
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    router, expected = Subscriber(), 0
    with few_pages(20), LLM(model, **FIELDS | {"kv_events_config": events}) as llm:

        def hear() -> None:
            nonlocal expected
            while socket.poll(500):
                number, (_, batch, rank) = heard(socket)
                assert (number, rank) == (expected, 0)
                expected += 1
                for event in batch:
                    router.hear(event)

        def cached() -> set[tuple[int, ...]]:
            pool, generation = llm._ask(lambda core: (core._scheduler.pool, core._cache_generation))
            return prefixes_of(pool, root_of(None, generation))

        socket.poll(1000)  # it subscribes while it waits; a publisher leaves out who has not yet
        llm.generate([[7 * i + j for j in range(20)] for i in range(15)], params, use_tqdm=False)
        hear()
        assert router.prefixes == cached() and len(router.pages) > 5
        llm.reset_prefix_cache()
        llm.generate([[5] * 20], params, use_tqdm=False)
        hear()
        assert router.prefixes == cached() and 0 < len(router.pages) < 5


def test_ranks_have_addresses_of_their_own() -> None:
    config = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="ipc:///tmp/r")
    second = config.of_rank(1).of_rank(1)
    assert [one.address(one.endpoint) for one in (config, second)] == ["tcp://*:5557", "tcp://*:5559"]
    assert second.address(str(second.replay_endpoint)) == "ipc:///tmp/r_dp2"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_events_config": {"endpoint": "http://x:1"}}, "it must be an address as tcp://"),
        ({"kv_events_config": {"endpoint": "tcp://*"}}, "it must be an address as tcp://"),
        ({"kv_events_config": {"topik": "x"}}, "topik"),
        ({"kv_events_config": {}, "enable_prefix_caching": False}, "there is nothing to tell"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_line(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        make_config(EngineConfig, **fields)
    assert "\n" not in str(refused.value)


def test_an_address_in_use_and_a_missing_package_are_said_in_a_line(
    socket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = listening(socket).replace("127.0.0.1", "*")
    with pytest.raises(ConfigError, match=r"tcp://\*:\d+ cannot be used: Address already in use"):
        EventPublisher(KVEventsConfig(endpoint=taken))
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxllm\[kv-events\]'"):
        EventPublisher(KVEventsConfig())
