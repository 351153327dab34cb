"""In which order executables are compiled, and for whom: with compiles that end when the test says so."""

import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait

import pytest

from jaxllm.engine.core import saved as saved_module
from jaxllm.engine.core.executables import URGENT_THREADS, Executables
from jaxllm.engine.core.keys import PLAIN, SAMPLED, Key
from jaxllm.engine.core.request import Chunk, Request
from jaxllm.engine.core.saved import CompilingProcess, SavedExecutables
from jaxllm.engine.core.sizes import Buckets
from jaxllm.engine.core.step import StepFunctions
from jaxllm.engine.features import features_of, features_of_encoder
from jaxllm.requests.sampling import SamplingParams
from tests.engine.step_sizes import step_sizes

MASKED = SAMPLED | {"grammar"}
ADJUST, SUMS = Key("put", 0, frozenset({"adjustments"})), Key("read", 0, frozenset({"sums"}))
SOON = 5.0
A_WHILE = 0.1
"""Long enough for a thread that is free to take up a job."""


class Compiled(str):
    """What a compile gives: it says of which key."""

    def __call__(self) -> None:
        raise AssertionError("nothing is run here")


class FakeFunctions(StepFunctions):
    """Stands in for StepFunctions: a compile begins, and ends when `finish` lets it."""

    platform = "cpu"

    def __init__(self):
        self.features = features_of(step_sizes(), widest_activation=16)
        self.begun: list[Key] = []
        self.options: list[dict[str, str] | None] = []
        self._changed = threading.Condition()
        self._finished: set[Key] = set()
        self._open = False

    def step(self, key):
        return FakeFunction(self, key), ()

    def finish(self, *keys: Key) -> None:
        with self._changed:
            self._finished |= set(keys)
            self._changed.notify_all()

    def finish_all(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def compile(self, key: Key) -> str:
        with self._changed:
            self.begun.append(key)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._open or key in self._finished, 60)
        return Compiled(f"compiled {key}")

    def wait_for_begun(self, count: int) -> list[Key]:
        """What has begun when `count` have, and no more of them come."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.begun) >= count, SOON), self.begun
        time.sleep(A_WHILE)
        return list(self.begun)


class FakeFunction:
    def __init__(self, functions, key):
        self._functions, self._key = functions, key

    def __call__(self):
        raise AssertionError("nothing is run here")

    def lower(self):
        return self

    def compile(self, compiler_options=None):
        self._functions.options.append(compiler_options)
        return self._functions.compile(self._key)


@pytest.fixture
def functions():
    functions = FakeFunctions()
    yield functions
    functions.finish_all()


@pytest.fixture
def executables(functions):
    executables = Executables(functions, Buckets.build(4, 32))
    yield executables
    executables.close()


@pytest.fixture
def callers():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def begin_and_cover(functions, executables):
    executables.begin()
    functions.finish(*executables.covering_keys())
    executables.wait_until_covered()
    return executables.plan()[len(executables.covering_keys()) :]


@pytest.mark.parametrize(("platform", "graph"), [("cpu", False), ("cuda", True), ("gpu", True), ("tpu", False)])
def test_on_nvidia_a_step_is_one_graph(functions, executables, platform, graph):
    functions.platform = platform
    functions.finish_all()
    executables.get(ADJUST)
    (options,) = functions.options
    assert (options is not None and "WHILE" in options["xla_gpu_enable_command_buffer"].split(",")) == graph


def test_covering_executables_come_before_all_others(functions, executables):
    executables.begin()
    covering = executables.covering_keys()
    assert set(functions.wait_for_begun(URGENT_THREADS)) <= set(covering)
    functions.finish(*covering)
    executables.wait_until_covered()
    begun = functions.wait_for_begun(len(covering) + 1)
    assert set(begun[:-1]) == set(covering)
    assert begun[-1] == executables.plan()[len(covering)]


def test_the_rest_follows_in_the_order_of_the_plan(functions, executables):
    begin_and_cover(functions, executables)
    functions.finish_all()
    executables.wait()
    assert functions.begun[len(executables.covering_keys()) :] == executables.plan()[len(executables.covering_keys()) :]
    assert executables.compiles.pending == 0
    assert executables.compiles.foreseen == len(executables.plan())


def test_without_adapters_no_step_with_them_is_planned(executables):
    assert not any("adapters" in key.variant for key in executables.plan())


@pytest.mark.parametrize("classifies", [False, True])
def test_what_an_encoders_texts_run_is_planned(functions, classifies):
    functions.features = features_of_encoder()
    executables = Executables(functions, Buckets.of_encoder(4, 32, None, classifies=classifies))
    begin_and_cover(functions, executables)
    functions.finish_all()
    executables.wait()
    texts = [
        Chunk(Request(str(i), [1, 2, 3], 3, SamplingParams(), 0.0, extras={"pooling": None}), 0, 3, 1) for i in "ab"
    ]
    for count in (5, 17, 32):
        assert executables.covering("encode", count, functions.features.wanted("encode", texts)) in executables.plan()
    executables.close()


def test_what_is_waited_for_goes_first_and_holds_up_what_is_not(functions, executables, callers):
    behind = begin_and_cover(functions, executables)
    before = functions.wait_for_begun(5)
    wanted = [behind[-1], behind[-3], Key("head", 3)]  # the last one nobody planned
    answers = [callers.submit(executables.get, key) for key in wanted[:2]]
    assert set(functions.wait_for_begun(7)[5:]) == set(wanted[:2])  # side by side, beside the one that had begun
    answers.append(callers.submit(executables.get, wanted[2]))
    functions.finish(before[-1])
    functions.finish(wanted[0])
    assert functions.wait_for_begun(8)[7:] == [wanted[2]]  # and nothing that nobody waits for
    functions.finish(*wanted)
    assert [answer.result(SOON) for answer in answers] == [f"compiled {key}" for key in wanted]
    assert functions.wait_for_begun(9)[8:] == [behind[1]]  # now the plan goes on
    assert executables.compiles.unforeseen == 1


def test_one_that_is_being_compiled_behind_is_not_compiled_twice(functions, executables, callers):
    behind = begin_and_cover(functions, executables)
    functions.wait_for_begun(5)
    answer = callers.submit(executables.get, behind[0])
    assert functions.wait_for_begun(5)[4:] == [behind[0]]
    functions.finish(behind[0])
    assert answer.result(SOON) == f"compiled {behind[0]}"


def test_a_step_takes_the_smallest_that_is_ready_and_covers_it(functions, executables):
    begin_and_cover(functions, executables)
    assert executables.covering("decode", 1) == Key("decode", 4)
    functions.finish(Key("decode", 2), Key("head", 4, MASKED))
    executables.get(Key("decode", 2))
    executables.get(Key("head", 4, MASKED))
    assert executables.covering("decode", 1) == Key("decode", 2)
    assert executables.covering("decode", 3) == Key("decode", 4)
    assert executables.covering("head", 1, SAMPLED) == Key("head", 4, MASKED)
    assert executables.covering("head", 1, PLAIN) == Key("head", 4, PLAIN)


def test_a_failed_compile_fails_those_who_ask_for_it_alone(functions, executables, monkeypatch, caplog):
    step = functions.step
    monkeypatch.setattr(functions, "step", lambda key: 1 / 0 if key == SUMS else step(key))
    begin_and_cover(functions, executables)
    functions.finish_all()
    with pytest.raises(ZeroDivisionError):
        executables.get(SUMS)
    assert executables.get(ADJUST) == f"compiled {ADJUST}"
    assert executables.missing([SUMS, ADJUST]) == [SUMS]
    assert [text for text in caplog.messages if "could not be compiled" in text] == [
        f"{SUMS} could not be compiled: requests that need it fail, and others run in larger steps: division by zero"
    ]


def test_the_log_says_when_the_last_one_is_done(functions, executables, caplog):
    caplog.set_level("INFO")
    executables.begin()
    functions.finish(*executables.covering_keys())
    executables.wait_until_covered()
    executables.announce_end()
    (first,) = caplog.messages
    left = len(executables.plan()) - len(executables.covering_keys())
    assert first.startswith(f"requests can run; {left} of {len(executables.plan())} executables are still to be")
    functions.finish_all()
    executables.wait()
    assert caplog.messages[1].startswith(f"all executables are done: 0 loaded, {len(executables.plan())} compiled in ")


def test_closing_drops_what_has_not_begun_and_waits_for_nothing(functions, executables, callers):
    behind = begin_and_cover(functions, executables)
    running = functions.wait_for_begun(5)[4]
    others = [behind[4], behind[5], behind[6]]
    answers = [callers.submit(executables.get, key) for key in (running, *others)]
    begun = functions.wait_for_begun(7)
    executables.close()
    assert not wait(answers, SOON).not_done
    for answer in answers:
        with pytest.raises(CancelledError):
            answer.result()
    with pytest.raises(CancelledError):
        executables.get(behind[7])
    functions.finish_all()
    time.sleep(A_WHILE)
    assert functions.begun == begun


class FakeSaved(SavedExecutables):
    """Stands in for SavedExecutables: the steps whose names it has are loaded."""

    def __init__(self):
        self.names: set[str] = set()
        self.loaded: list[Key] = []

    def has(self, key):
        return str(key) in self.names

    def load(self, key, arguments):
        if str(key) not in self.names:
            return None
        self.loaded.append(key)
        return Compiled(f"loaded {key}")

    def save(self, key, compiled):
        self.names.add(str(key))


class FakeHelper(CompilingProcess):
    """Stands in for CompilingProcess: it has saved what the test says."""

    def __init__(self, saved):
        self._saved = saved
        self.closed = False

    def start(self, on_saved, on_end):
        self._on_saved, self.end = on_saved, on_end

    def save(self, key):
        self._saved.names.add(str(key))
        self._on_saved(str(key))

    def close(self):
        self.closed = True


@pytest.fixture
def helped(functions, monkeypatch):
    """Executables with a helper, whose covering steps are compiled."""
    monkeypatch.setattr(
        "jaxllm.engine.core.executables.compile_to_save", lambda lowered, options: (lowered.compile(), True)
    )
    saved = FakeSaved()
    executables = Executables(functions, Buckets.build(4, 32), saved=saved, helper=FakeHelper(saved))
    begin_and_cover(functions, executables)
    yield executables
    executables.close()


def test_what_a_helper_has_saved_is_loaded(functions, helped):
    rest = helped.plan()[len(helped.covering_keys()) :]
    assert helped.compiles.pending == len(rest)
    for key in rest:
        helped._helper.save(key)
    helped._helper.end()
    helped.wait()
    assert helped._saved.loaded == rest
    assert set(functions.begun) == set(helped.covering_keys()), "the engine has compiled nothing else"
    assert helped.compiles.pending == 0


def test_what_a_request_waits_for_is_compiled_at_once_although_a_helper_will(functions, helped):
    key = Key("head", 1, SAMPLED)
    functions.finish(key)
    assert helped.get(key) == f"compiled {key}"
    helped._helper.save(key)
    assert key not in helped._saved.loaded


def test_what_a_helper_leaves_is_compiled_here(functions, helped):
    rest = helped.plan()[len(helped.covering_keys()) :]
    helped._helper.save(rest[0])
    helped._helper.end()
    functions.finish_all()
    helped.wait()
    assert helped._saved.loaded == rest[:1] and set(rest[1:]) <= set(functions.begun)


def test_a_process_that_compiles_may_say_much(tmp_path, monkeypatch, caplog):
    """XLA's warnings are long, and nothing reads them while it compiles."""
    (tmp_path / "talkative.py").write_text(
        "import os, sys\nprint('w' * 2**20, file=sys.stderr)\nprint(os.environ['TOLD'], flush=True)\nsys.exit('why')"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(saved_module, "MODULE", "talkative")
    saved, ended = [], threading.Event()
    process = CompilingProcess(environment={"TOLD": "adjust"})
    process.start(saved.append, ended.set)
    try:
        assert ended.wait(60) and saved == ["adjust"]
        assert caplog.messages == ["the process that compiles has failed, and the engine compiles: why"]
    finally:
        process.close()


def test_a_helper_ends_with_the_engine(helped):
    helped.close()
    assert helped._helper.closed
