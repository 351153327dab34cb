"""One model over two processes says what it says in one, and where one of them fails both end with a line."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM
from tests.reference import load_golden
from tests.reference.adapters import write_adapter
from tests.reference.tiny import draw_weights, save_checkpoint, tiny_config, write_checkpoint
from tests.two_processes import EXTRAS, FIELDS, answers, programs
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


OF_THE_LEADER = {
    "kill": r"process 1 on \S+ is gone",
    "stop": r"process 1 on \S+ has said nothing for 8 seconds",
    "raise": r"process 1 on \S+ has failed: RuntimeError: out of luck",
    "diverge": r"process 1 on \S+ came to other tokens at step \d+, so that the group no longer is one",
}


@pytest.mark.parametrize("fault", list(OF_THE_LEADER))
def test_a_process_that_fails_ends_the_group_with_a_line(small: Path, fault: str) -> None:
    with programs(small, fault=fault, skip_tokenizer_init=True) as (leads, follows):
        wait_until_it_answers(leads)
        (said,) = ended([leads])
        assert re.search(rf"^jaxllm: error: {OF_THE_LEADER[fault]}; the group has ended$", said, re.MULTILINE), said
        assert leads.returncode == 1
        if fault == "stop":
            follows.send_signal(signal.SIGCONT)
        follows.wait(END_SECONDS)
        assert follows.returncode == (-signal.SIGKILL if fault == "kill" else 1)


def test_without_its_leader_a_process_ends(small: Path) -> None:
    with programs(small, skip_tokenizer_init=True) as (leads, follows):
        wait_until_it_answers(leads)
        leads.kill()
        follows.wait(END_SECONDS)
        assert follows.returncode not in (0, None)
