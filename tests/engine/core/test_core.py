"""The engine core by itself: what it does with the tokens of a step, with half-steps, and with what fails."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxllm.engine.core.feature import Surroundings
from jaxllm.engine.core.handle import Handle, SampledRow
from jaxllm.engine.core.loop import EngineCore
from jaxllm.engine.core.pages import PagePool
from jaxllm.engine.core.registry import Features
from jaxllm.engine.core.request import Request, Status
from jaxllm.engine.core.sampler import Sampled, Settled
from jaxllm.engine.core.scheduler import Scheduler
from jaxllm.engine.features.grammar.grammar import GrammarFeature
from jaxllm.engine.features.scores import ScoresFeature
from jaxllm.engine.messages import EngineRequest, TokenDelta
from jaxllm.requests.sampling import SamplingParams
from jaxllm.requests.structured_outputs import StructuredOutputs
from tests.engine.simulated_device import VOCAB, SimulatedHandle, SimulatedRunner, alone, next_token

GRAMMAR = StructuredOutputs(regex="ignored: ScriptedGrammars decides")


class Script:
    """A grammar that is a list: None where any token may come, otherwise the one that must."""

    def __init__(self, script: list[int | None], log: list[str]):
        self.script, self.at, self.log = script, 0, log
        self.active, self.opening = True, None

    @property
    def complete(self) -> bool:
        return self.at == len(self.script)

    def accept(self, token: int) -> None:
        assert self.script[self.at] in (None, token), "a token that the grammar does not allow"
        self.at += 1
        self.log.append("accept")

    def check(self) -> None:
        """It never fails."""

    def after(self, token: int) -> None:
        raise AssertionError("nothing is tried ahead here")

    def forced(self) -> list[int]:
        rest = self.script[self.at :]
        end = next((i for i, token in enumerate(rest) if token is None), len(rest))
        return [token for token in rest[:end] if token is not None]


class ScriptedGrammars:
    def __init__(self, script: list[int | None], log: list[str]):
        self.script, self.log = script, log

    def build(self, outputs: StructuredOutputs) -> Script:
        return Script(self.script, self.log)

    def fill(self, constraints: list[Script | None], mask: np.ndarray) -> None:
        self.log.append("fill")
        mask[...] = -1
        for row, constraint in zip(mask, constraints, strict=True):
            if constraint is not None and constraint.script[constraint.at] is not None:
                row[0] = 1 << constraint.script[constraint.at]


class Engine:
    def __init__(self, script: list[int | None] | None = None, *, eos: int | None = None, max_num_seqs: int = 4):
        self.pool = PagePool(40, 4)
        self.runner = SimulatedRunner(40, 4)
        sizes: Any = SimpleNamespace(vocab_size=VOCAB)
        eos_ids = [] if eos is None else [eos]
        around = Surroundings(self.runner, sizes, self.pool, None, eos_ids)  # type: ignore[arg-type]
        listed = [GrammarFeature(), ScoresFeature()]
        features = self.runner.features = Features(feature.attached(around) for feature in listed)
        self.scheduler = Scheduler(self.pool, max_num_seqs, 32, 100, features=features)
        self.grammars: Any = ScriptedGrammars(script or [], self.runner.log)
        features["grammar"].grammars = self.grammars  # type: ignore[attr-defined]
        self.core = EngineCore(self.scheduler, self.pool, self.runner, None, eos_ids, features=features)  # type: ignore[arg-type]
        around.core = self.core

    def add(self, name: str, prompt: list[int], group: str = "", **params: Any) -> None:
        message = EngineRequest(
            request_id=name, prompt_token_ids=prompt, sampling_params=SamplingParams(**params),
            arrival_time=time.time(), group=group,
        )  # fmt: skip
        self.core.add(message)

    def request(self, name: str) -> Request:
        return next(r for r in (*self.scheduler.running, *self.scheduler.waiting) if r.request_id == name)

    def prepared(self) -> None:
        """Wait for grammars that are built on a thread."""
        end = time.monotonic() + 20
        while not self.core._preparation.has_ready:
            assert time.monotonic() < end
            time.sleep(0.001)

    def run(self) -> dict[str, list[TokenDelta]]:
        found: dict[str, list[TokenDelta]] = {}
        while self.core.has_work:
            for delta in self.core.turn():
                found.setdefault(delta.request_id, []).append(delta)
        assert self.pool.num_free == self.pool.num_pages - 1
        return found


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def test_a_row_has_as_many_tokens_as_the_step_gives_or_as_the_device_settles():
    a, b = (Request(name, [1], 1, SamplingParams(), 0.0) for name in "ab")
    rows, tokens = [SampledRow(a, 0), SampledRow(b, 1)], np.array([5, 6, 7, 8, 9, 10, 99, 99, 99])
    several = Handle(rows, Sampled(tokens, None), num_steps=2, stride=3)  # type: ignore[arg-type]
    assert [(r.request.request_id, r.row, r.tokens) for r in several.results()] == [("a", 0, [5, 6]), ("b", 3, [8, 9])]
    settled = Settled(np.array([2, 1, 0]), np.array([2, 0, 0]))  # type: ignore[arg-type]
    drafts = Handle(rows, Sampled(tokens, None, settled), stride=3, reserved=[2, 2])  # type: ignore[arg-type]
    assert [r[1:] for r in drafts.results()] == [(0, [5, 6, 7], 2, 2), (3, [8], 1, 2)]


@pytest.mark.parametrize(
    ("second", "lengths", "answer", "order"),
    [("a", (50, 30), 1, "ssrsrr"), ("b", (50, 30), 1, "srsrsr"), ("b", (5, 6), 2, "ssrr")],
)
def test_where_groups_take_turns_a_step_full_of_prompts_is_read_before_the_next_is_sent(
    second: str, lengths: tuple[int, int], answer: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then whoever comes while it runs is in the next one. Else a step is always (s)ent before the last is (r)ead."""
    engine = Engine()
    happened = []
    dispatch, wait = SimulatedRunner.dispatch, SimulatedHandle.wait
    monkeypatch.setattr(
        SimulatedRunner,
        "dispatch",
        lambda *given: happened.append("s") or dispatch(*given),  # type: ignore[func-returns-value]
    )
    monkeypatch.setattr(SimulatedHandle, "wait", lambda handle: happened.append("r") or wait(handle))  # type: ignore[func-returns-value]
    engine.add("1", [1] * lengths[0], "a", max_tokens=1)
    engine.add("2", [2] * lengths[1], second, max_tokens=answer)
    engine.run()
    assert "".join(happened) == order


@pytest.mark.parametrize("tokens", [[], [4], [4, 5, 6, 7, 8, 9]])
def test_a_step_may_give_fewer_tokens_than_were_in_flight_or_more(tokens):
    engine = Engine()
    engine.add("a", [1, 2, 3, 4, 5], max_tokens=20)
    request = engine.request("a")
    engine.scheduler.schedule()
    engine.scheduler.accept(request, tokens, 1)
    assert request.num_inflight == 0
    assert request.token_ids == [1, 2, 3, 4, 5, *tokens]
    assert request.num_registered == 1, "only what was run is shared"
    chunk = engine.scheduler.schedule().chunks[0] if tokens else None
    assert chunk is None or (chunk.start, chunk.length, chunk.num_sampled) == (5, len(tokens), 1)


def test_a_stop_cuts_what_follows_it():
    """The grammar forces tokens behind the end-of-sequence token: they are not the answer's."""
    engine = Engine([None, 2, 2, 0, 1, 1, 1], eos=0)
    engine.add("a", [1, 2], max_tokens=20, structured_outputs=GRAMMAR, min_tokens=2)
    engine.prepared()
    deltas = engine.run()["a"]
    assert tokens_of(deltas)[1:] == [2, 2, 0]
    assert deltas[-1].finish_reason == "stop"


def test_the_length_counts_forced_tokens_one_by_one():
    engine = Engine([None, 2, 2, 0, 1, 1, 1])
    engine.add("a", [1, 2], max_tokens=4, structured_outputs=GRAMMAR)
    engine.prepared()
    deltas = engine.run()["a"]
    assert len(tokens_of(deltas)) == 4 and deltas[-1].finish_reason == "length"


def test_masks_are_filled_while_the_backbone_runs_from_the_tokens_of_the_step_before():
    engine = Engine([None, None, None])
    engine.add("a", [1, 2], max_tokens=20, structured_outputs=GRAMMAR)
    engine.prepared()
    engine.run()
    log = engine.runner.log
    # The step that runs when the grammar turns out complete is one too many, and is not sampled.
    assert log == ["backbone", "fill", "head", *["backbone", "accept", "fill", "head"] * 2, "backbone", "accept"]


def test_forced_tokens_take_one_step_and_withdraw_the_row_under_way():
    script: list[int | None] = [None, 1, 2, 0, 1, None]
    engine = Engine(script)
    engine.add("a", [1, 2], max_tokens=20, structured_outputs=GRAMMAR)
    engine.prepared()
    deltas = engine.run()["a"]
    assert [len(d.token_ids) for d in deltas] == [5, 1]
    assert tokens_of(deltas)[1:5] == [1, 2, 0, 1]
    assert engine.core.stats().generation_tokens == 6


def test_withdrawing_leaves_the_others_their_rows():
    script: list[int | None] = [None, 1, 2, 0, 1, None]
    engine = Engine(script)
    engine.add("free", [2, 2, 1], max_tokens=9)
    engine.add("a", [1, 2], max_tokens=20, structured_outputs=GRAMMAR)
    engine.prepared()
    found = engine.run()
    assert tokens_of(found["a"])[1:5] == [1, 2, 0, 1]
    assert [2, 2, 1, *tokens_of(found["free"])] == alone([2, 2, 1], None, 12, None)


def test_what_fails_while_a_request_is_read_fails_it_alone():
    wrong = (next_token([1, 2], None) + 1) % VOCAB
    engine = Engine([wrong, None])
    engine.grammars.fill = lambda constraints, mask: mask.fill(-1)  # allows anything
    engine.add("free", [2, 2, 1], max_tokens=9)
    engine.add("a", [1, 2], max_tokens=20, structured_outputs=GRAMMAR)
    engine.prepared()
    found = engine.run()
    assert [2, 2, 1, *tokens_of(found["free"])] == alone([2, 2, 1], None, 12, None)
    (last,) = found["a"]
    assert last.finish_reason == "error" and "does not allow" in (last.error or "")


def test_a_request_that_ended_takes_nothing_from_the_step_under_way():
    engine = Engine()
    engine.add("a", [1, 2, 0], max_tokens=50)
    for _ in range(3):
        engine.core.turn()
    request = engine.request("a")
    engine.core.abort(["a", "nobody"])
    assert request.status is Status.FINISHED
    assert engine.run() == {}


def test_a_request_that_cannot_be_begun_fails_alone():
    engine = Engine()

    def prepare(request: Request, seed: int) -> None:
        if request.request_id == "bad":
            raise OverflowError("Python integer 2147483648 out of bounds for int32")

    engine.runner.prepare = prepare  # type: ignore[method-assign]
    engine.add("good", [2, 2, 1], max_tokens=3)
    engine.add("bad", [1, 2], max_tokens=3)
    found = engine.run()
    assert [2, 2, 1, *tokens_of(found["good"])] == alone([2, 2, 1], None, 6, None)
    assert [(d.finish_reason, d.error) for d in found["bad"]] == [
        ("error", "OverflowError: Python integer 2147483648 out of bounds for int32")
    ]


def test_a_prompt_that_can_never_run_fails_alone():
    engine = Engine()
    engine.add("whole", [1] * 99, max_tokens=3)
    engine.add("longer", [1] * 100, max_tokens=3)
    found = engine.run()
    assert len(tokens_of(found["whole"])) == 1
    assert [(d.finish_reason, d.error, d.invalid) for d in found["longer"]] == [
        ("error", "prompt has 100 tokens; accepted are up to 99", True)
    ]


def test_requests_without_a_grammar_do_not_wait_for_slow_grammars():
    """This one has another thing to get ready: an executable that few requests need."""
    engine = Engine()
    may_end = threading.Event()
    engine.grammars.build = lambda outputs: may_end.wait(20)
    try:
        for name in "abcdefgh":
            engine.add(name, [1], max_tokens=2, structured_outputs=GRAMMAR)
        engine.runner.missing = lambda request: ["an executable"]  # type: ignore[method-assign]
        engine.add("z", [1], max_tokens=2)
        engine.prepared()
        engine.core.turn()
        assert [request.request_id for request in engine.scheduler.running] == ["z"]
    finally:
        may_end.set()
        engine.core.close()
