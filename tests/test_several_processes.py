"""One model over two processes says what it says in one, and where one of them fails both end with a line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxllm import LLM
from tests.reference import load_golden
from tests.reference.adapters import write_adapter
from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config, write_checkpoint
from tests.support.several_processes import EXTRAS, FIELDS, HALVES, answers, programs
from tests.weights.models import real_model

pytestmark = pytest.mark.programs

START_SECONDS = 120
"""For two processes to start, on a machine that does other things as well."""
END_SECONDS = 25
"""For a group to end: JAX's own heartbeat is 15 seconds, ours is less."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights behind a real vocabulary, so that there are grammars."""
    config = tiny_config("llama_gqa") | {"vocab_size": 49152, "max_position_embeddings": 512}
    shapes = dict(load_golden("llama_gqa").tensor_shapes)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[name] = (config["vocab_size"], config["hidden_size"])
    return save_checkpoint(config, draw_weights("llama_gqa", shapes), tmp_path_factory.mktemp("model"))


def test_two_processes_say_what_one_says(model: Path, tmp_path: Path) -> None:
    tokenizer = str(real_model("smollm2-135m"))
    adapter = str(write_adapter(tmp_path / "adapter", model, ["q_proj", "down_proj"]))
    out = tmp_path / "said.json"
    with programs(model, out=str(out), adapter=adapter, tokenizer=tokenizer, **EXTRAS) as processes:
        with LLM(str(model), tokenizer=tokenizer, **FIELDS, **EXTRAS) as alone:
            expected = json.loads(json.dumps(answers(alone, adapter)))
        ends = [process.communicate(timeout=START_SECONDS) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], ends
    said = json.loads(out.read_text())
    for name in ("logprobs", "embedded"):
        for one, other in zip(expected.pop(name), said.pop(name), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    assert said == expected
    assert said["adapted"][0] != said["greedy"][0] and said["adapted"][1] == said["greedy"][1]
    assert ends[1][1] == ""


PARTS = {
    "a stage each": (2, {"pipeline_parallel_size": 2}),
    "a stage each, of three": (3, {"pipeline_parallel_size": 3}),
    "half a stage each": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "two devices of a stage each": (2, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "a batch each": (2, {"data_parallel_size": 2, "enable_dp_attention": True}),
}


@pytest.mark.parametrize("layout", list(PARTS))
def test_stages_and_batches_in_several_processes_say_what_one_process_says(
    model: Path, alone: dict[str, Any], tmp_path: Path, layout: str
) -> None:
    count, parts = PARTS[layout]
    expected, out, tokenizer = dict(alone), tmp_path / "said.json", str(real_model("smollm2-135m"))
    ready = {"enforce_eager": layout != "a stage each"}
    with programs(model, count=count, out=str(out), parts=parts, tokenizer=tokenizer, **ready) as processes:
        ends = [process.communicate(timeout=START_SECONDS) for process in processes]
        assert [process.returncode for process in processes] == [0] * count, ends
    said = json.loads(out.read_text())
    for name in ("logprobs", "embedded"):
        for one, other in zip(expected.pop(name), said.pop(name), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    assert said == expected
    assert {end[1] for end in ends[1:]} == {""}


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Any]:
    """What one process says, without adapters and drafts."""
    with LLM(str(model), tokenizer=str(real_model("smollm2-135m")), **FIELDS) as llm:
        said: dict[str, Any] = json.loads(json.dumps(answers(llm, "")))
    return said


def wait_until_it_answers(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    said = []
    for line in process.stdout:  # gloo says something as well
        if line == "all is compiled\n":
            return
        said.append(line)
    pytest.fail(f"it ended: {said}, {process.communicate()}")


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each process, all of which have ended by themselves, has said last."""
    deadline = time.monotonic() + END_SECONDS
    return [process.communicate(timeout=max(0.1, deadline - time.monotonic()))[1] for process in processes]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama_gqa", tmp_path_factory.mktemp("small"))


IN_STAGES = {"pipeline_parallel_size": 2}
OF_THE_LEADER = {
    "kill": r"process 1 on \S+ is gone",
    "stop": r"process 1 on \S+ has said nothing for 8 seconds",
    "raise": r"process 1 on \S+ has failed: RuntimeError: out of luck",
    "diverge": r"process 1 on \S+ came to other tokens at step \d+, so that the group no longer is one",
}


@pytest.mark.parametrize(
    ("fault", "parts"),
    [*((fault, HALVES) for fault in OF_THE_LEADER), *((fault, IN_STAGES) for fault in ("kill", "stop"))],
    ids=str,
)
def test_a_process_that_fails_ends_the_group_with_a_line(small: Path, fault: str, parts: dict[str, int]) -> None:
    with programs(small, fault=fault, parts=parts, skip_tokenizer_init=True) as (leads, follows):
        wait_until_it_answers(leads)
        (said,) = ended([leads])
        assert re.search(rf"^jaxllm: error: {OF_THE_LEADER[fault]}; the group has ended$", said, re.MULTILINE), said
        assert leads.returncode == 1
        if fault == "stop":
            follows.send_signal(signal.SIGCONT)
        follows.wait(END_SECONDS)
        assert follows.returncode == (-signal.SIGKILL if fault == "kill" else 1)


PLACES = {
    "kill at join_processes": "jaxllm: error: process 0 is gone",
    "kill at load_weights": "jaxllm: error: process 0 is gone",
    "stop at _take": "has stopped before all processes came: timed out",
    "stop at join_processes": "jaxllm: error: process 0 has said nothing for 8 seconds",
    "stop at prepare_backend": "jaxllm: error: process 0 has said nothing for 8 seconds",
    "stop at load_weights": "jaxllm: error: process 0 has said nothing for 8 seconds",
    "stop at gather_weights": "jaxllm: error: process 0 has said nothing for 8 seconds",
}


@pytest.mark.parametrize("fault", list(PLACES))
def test_without_its_leader_a_process_that_starts_ends(small: Path, fault: str) -> None:
    with programs(small, first=fault, skip_tokenizer_init=True) as (leads, follows):
        assert leads.stdout is not None and "now\n" in iter(leads.stdout.readline, "")
        since = time.monotonic()
        (said,) = ended([follows])
        assert follows.returncode == 1 and said.splitlines()[-1].endswith(PLACES[fault]), said
        assert time.monotonic() - since < 14  # JAX's heartbeat is 15 seconds


def test_a_leader_that_starts_and_is_busy_is_waited_for(small: Path) -> None:
    with programs(small, first="hold at join_processes", skip_tokenizer_init=True) as (leads, follows):
        wait_until_it_answers(leads)
        assert follows.poll() is None


@pytest.mark.parametrize("parts", [HALVES, IN_STAGES], ids=str)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_without_its_leader_a_process_ends(small: Path, parts: dict[str, int], fault: str) -> None:
    with programs(small, parts=parts, skip_tokenizer_init=True) as (leads, follows):
        wait_until_it_answers(leads)
        leads.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
        (said,) = ended([follows])
        if fault == "stop":  # where it is gone, JAX may say so as well, and abort the process first
            assert (follows.returncode, said) == (1, "jaxllm: error: process 0 has said nothing for 8 seconds\n")
        assert follows.returncode not in (0, None)
