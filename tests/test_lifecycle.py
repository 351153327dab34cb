"""Engines end, and leave nothing behind: threads, memory, mappings, or a program that lingers.

Each test runs a program of its own, so that nothing else's threads are counted.
"""

import json
import subprocess
import sys
import textwrap

import pytest

from tests.reference.tiny import write_checkpoint

pytestmark = pytest.mark.programs

SETTLE_SECONDS = 30.0

PRELUDE = """
import gc, json, os, sys, threading, time
import jax
from jaxllm import LLM, SamplingParams
from tests.support.quick_compile import quick_compile

quick_compile().__enter__()
compiled = 0  # executables that were ready since the program began
listeners = []  # each is called when one more is

@jax.monitoring.register_event_duration_secs_listener
def count(event, *_, **__):
    global compiled
    if event.endswith("backend_compile_duration"):
        compiled += 1
        for listener in listeners:
            listener()

SMALL = {"max_num_seqs": 2, "max_num_batched_tokens": 16}
MANY = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)

def start(**fields):
    llm = LLM(
        sys.argv[1], dtype="float32", skip_tokenizer_init=True, max_model_len=96, kv_cache_memory="16MiB",
        block_size=8, compile_cache_dir=os.environ["TESTS_COMPILE_CACHE"], **fields,
    )
    llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    return llm

def until_compiled(llm):
    while llm.stats().compiles_pending:
        time.sleep(0.05)

def threads():  # but for the one that tqdm keeps in every program
    return sum(thread.name != "tqdm_monitor" for thread in threading.enumerate())

def facts():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {
        "mappings": sum(1 for _ in open("/proc/self/maps")),
        "threads": threads(),
        "megabytes": int(status["VmRSS"].split()[0]) / 1024,
        "arrays": len(jax.live_arrays()),
    }
"""

FORGETTING = {
    "shutdown": "llm.shutdown()",  # the name still holds it
    "with": "llm.__exit__(None, None, None)",
    "del": "del llm",
}

needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc tells")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama_gqa")
    write_checkpoint("llama_gqa", path)
    return path


def run(directory, program, expected_status=0):
    """What a program prints, as JSON, a line at a time."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(program), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=1500)
    assert process.returncode == expected_status, err[-3000:]
    assert "Fatal" not in err and "FATAL" not in err
    return [json.loads(line) for line in out.splitlines()]


def one_after_another(directory, count):
    """Facts of each engine while it runs and after it has ended; the ways to end it take turns."""
    ways = list(FORGETTING.values())
    lines = run(
        directory,
        f"""
        gc.disable()  # what only a collection frees is not freed
        for turn in range({count}):
            llm = start(**SMALL)
            if turn % 2:
                until_compiled(llm)
            running = facts()
            exec({ways!r}[turn % {len(ways)}])
            deadline = time.time() + {SETTLE_SECONDS}
            while threads() > 1 and time.time() < deadline:
                time.sleep(0.01)  # a compile that has begun is to end
            print(json.dumps({{"running": running, "ended": facts()}}))
        """,
    )
    return lines


def check_flat(lines, settled):
    """`settled` engines fill what is kept for good: allocators' arenas, JAX's own caches."""
    first, last = lines[settled - 1]["ended"], lines[-1]["ended"]
    one_engine = max(line["running"]["mappings"] - line["ended"]["mappings"] for line in lines)
    assert one_engine > 300  # else there is nothing to see
    assert last["mappings"] - first["mappings"] < one_engine / 10
    for line in lines:
        assert line["ended"]["threads"] == 1
        assert line["ended"]["arrays"] == 0
    return last["megabytes"] / first["megabytes"]


@needs_proc
def test_engines_one_after_another_leave_nothing(directory):
    check_flat(one_after_another(directory, 6), settled=1)


@needs_proc
@pytest.mark.slow
def test_fifty_engines_take_no_more_than_a_few(directory):
    growth = check_flat(one_after_another(directory, 50), settled=15)
    assert growth < 1.1


@needs_proc
def test_an_engine_that_cannot_start_leaves_nothing(directory):
    (lines,) = run(
        directory,
        """
        import jaxllm.engine.start.build as build
        from jaxllm.errors import CheckpointError

        def refuse(*_, **__):
            raise CheckpointError("cut short")

        build.load_parameters = refuse
        try:
            start(**MANY)
        except CheckpointError:
            began = time.time()
        while threads() > 1 and time.time() < began + 30:
            time.sleep(0.01)
        print(json.dumps(facts()))
        """,
    )
    assert lines["threads"] == 1


@pytest.mark.parametrize(("ways", "cached"), [(["shutdown"], False), (["with", "del"], True)], ids=["shutdown", "rest"])
def test_ending_waits_for_no_compile(directory, ways, cached):
    """And the program goes on: the compile that is under way does it no harm."""
    lines = run(
        directory,
        f"""
        jax.config.update("jax_enable_compilation_cache", {cached})
        for way in {[FORGETTING[way] for way in ways]!r}:
            llm = start(**MANY)
            pending, before = llm.stats().compiles_pending, compiled
            exec(way)
            print(json.dumps({{"pending": pending, "before": before, "compiled": compiled - before}}))
        """,
    )
    assert len(lines) == len(ways)
    for line in lines:
        assert line["pending"] > 10 and line["before"] > 0
        assert line["compiled"] < line["pending"] / 2


@pytest.mark.parametrize("last, status", [("pass", 0), ("raise ValueError", 1), ("sys.exit(3)", 3)])
def test_a_program_that_just_ends_ends_at_once(directory, last, status):
    lines = run(
        directory,
        f"""
        import atexit
        llm = start(**MANY)
        atexit.register(lambda: print(json.dumps({{"handler": True}})))
        print(json.dumps({{"pending": llm.stats().compiles_pending, "before": compiled}}))
        listeners.append(lambda: print(json.dumps({{"compiled": True}}), flush=True))
        {last}
        """,
        status,
    )
    [(pending, before)] = [(line["pending"], line["before"]) for line in lines if "pending" in line]
    assert pending > 10 and before > 0
    assert sum("handler" in line for line in lines) == 1  # exit handlers run as ever, and what they print is not lost
    assert sum("compiled" in line for line in lines) < pending / 2


def test_whatever_a_request_asks_for_was_planned(directory):
    lines = run(
        directory,
        """
        llm = start(**SMALL)
        every = SamplingParams(temperature=1, max_tokens=2, logprobs=2, prompt_logprobs=-1)
        llm.generate([[1, 2, 3], [4]], every, use_tqdm=False)
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2), use_tqdm=False)
        print(json.dumps({"unforeseen": llm.stats().compiles_unforeseen}))
        """,
    )
    assert lines[0]["unforeseen"] == 0
