"""JSON read in slices gives what the standard library gives, and refuses what that refuses."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from jaxllm.serving.http.sliced_json import MIN_RUN, Integers, from_json
from jaxllm.serving.openai.tokenize_types import DetokenizeRequest

MANY = list(range(MIN_RUN))
RUN = "1," * MIN_RUN


@pytest.mark.parametrize(
    "value",
    [
        MANY,
        [1.5, *MANY],
        [None, *MANY, {"a": [1, 2, *MANY]}],
        {"a": MANY, "b": [[*MANY, "x"], 2.5, [*MANY, *MANY]], "c": "[1,2"},
        {"a": RUN, 'b"\\': RUN + '"' + RUN, "c": [RUN, *MANY]},
        [-1e-7, *([10**17] * MIN_RUN), 2**64],
    ],
)
def test_lists_of_numbers_anywhere(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, indent=1), json.dumps(value, separators=(",", ":"))):
        assert from_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        f"[{RUN}]", f"[{RUN},1]", f"[{RUN} ,{RUN}1]", f"[{RUN}1.,{RUN}1]", f"[{RUN}1 2,{RUN}1]", f"[{RUN}01,{RUN}1]",
        f"[{RUN}1", f'{{"a":{RUN}1}}', f'{{"a":[{RUN}1,"b":1}}', f"{RUN}1", f"[{RUN}1]]", f"[{RUN}NaN]", f"[{RUN}--1]",
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_json(text.encode())


def test_only_a_list_of_integers_is_known_as_one() -> None:
    assert type(from_json(json.dumps({"tokens": MANY}).encode())["tokens"]) is Integers
    for other in ([1.5, *MANY], [*MANY, True], ["1", *MANY]):
        sent = from_json(json.dumps({"tokens": other}).encode())
        assert type(sent["tokens"]) is list
        with pytest.raises(ValidationError):
            DetokenizeRequest.model_validate(sent)


def test_a_known_list_is_not_looked_through_again() -> None:
    sent = from_json(json.dumps({"tokens": MANY}).encode())
    assert DetokenizeRequest.model_validate(sent).tokens is sent["tokens"]
    with pytest.raises(ValidationError):  # it is no list of texts
        TypeAdapter(list[str]).validate_python(sent["tokens"])


def test_another_thread_goes_on_meanwhile() -> None:
    """Parsed by one call, a million integers stop every thread for 50 ms and more."""
    text = json.dumps(list(range(1_000_000))).encode()
    waits: list[float] = []
    reader = threading.Thread(target=lambda: [from_json(text) for _ in range(3)])
    reader.start()
    while reader.is_alive():
        began = time.perf_counter()
        time.sleep(0.001)
        waits.append(time.perf_counter() - began)
    assert len(waits) > 30 and sorted(waits)[len(waits) // 2] < 0.03
