from __future__ import annotations

import asyncio
import json
import math
import random
import stat
import time
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.cli.bench import server
from jaxllm.cli.bench.comparing import windows
from jaxllm.cli.bench.measuring import Trace, random_prompts, run_load, send_times, spread, summarize
from jaxllm.config import EngineConfig
from jaxllm.errors import ConfigError

pytestmark = pytest.mark.programs

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(numbers)
def test_a_spread_is_numpys(values: list[float]) -> None:
    expected = [np.mean(values), *np.percentile(values, [50, 90, 99]), np.max(values)]
    assert list(spread(values)) == ["mean", "p50", "p90", "p99", "max"]
    assert list(spread(values).values()) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_no_values_have_no_spread() -> None:
    assert spread([]) == {}


def test_a_summary_worked_by_hand() -> None:
    steady = Trace(start=10.0, prompt_tokens=5, arrivals=[10.5, 10.6, 10.8], output_tokens=3)
    single = Trace(start=11.0, prompt_tokens=7, arrivals=[11.1], output_tokens=1)
    failed = Trace(start=11.0, prompt_tokens=7, error="429")
    summary = summarize([steady, single, failed], duration=2.0)
    assert (summary["completed"], summary["failed"]) == (2, 1)
    assert (summary["prompt_tokens"], summary["output_tokens"]) == (12, 4)
    assert (summary["requests_per_s"], summary["prompt_tokens_per_s"], summary["output_tokens_per_s"]) == (1, 6, 2)
    assert summary["ttft_ms"]["mean"] == pytest.approx(300)  # (500 + 100) / 2
    assert summary["tpot_ms"]["mean"] == pytest.approx(150)  # 300 ms over two gaps; the single token has none
    assert summary["itl_ms"]["max"] == pytest.approx(200)
    assert summary["e2e_ms"]["p50"] == pytest.approx(450)  # between 800 and 100


def test_a_run_where_everything_failed_still_has_a_summary() -> None:
    assert summarize([Trace(start=0.0, prompt_tokens=1, error="x")], 1.0)["ttft_ms"] == {}


def test_prompts_are_random_reproducible_and_within_the_vocabulary() -> None:
    first, again = (random_prompts(4, 50, 1200, random.Random(3)) for _ in range(2))
    assert first == again
    assert [len(prompt) for prompt in first] == [50] * 4
    assert all(600 <= token < 1200 for prompt in first for token in prompt)
    assert len({tuple(prompt) for prompt in first}) == 4


def test_requests_arrive_as_a_poisson_process() -> None:
    gaps = np.diff(send_times(20_000, 50.0, random.Random(0)))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)  # of an exponential, the standard deviation is the mean
    assert send_times(3, math.inf, random.Random(0)) == [0.0] * 3


def test_the_load_keeps_to_its_concurrency_and_its_times() -> None:
    running = peak = 0
    started: list[float] = []

    async def send(prompt: list[int]) -> Trace:
        nonlocal running, peak
        started.append(time.perf_counter())
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.02)
        running -= 1
        return Trace(start=0.0, prompt_tokens=len(prompt))

    begin = time.perf_counter()
    traces, duration = asyncio.run(run_load(send, [[1]] * 6 + [[1, 2]], [0.0] * 6 + [0.2], concurrency=2))
    assert peak == 2
    assert [trace.prompt_tokens for trace in traces] == [1] * 6 + [2]
    assert started[-1] - begin >= 0.2 and duration >= 0.22


def test_throughput_runs_prefill_alone_and_then_everything(cli, counting, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = cli(
        "bench", "throughput", "m", "--dtype", "float32", "--num-streams", "1", "3", "--input-len", "5",
        "--output-len", "4", "--num-iters", "2", "--json", str(file),
    )  # fmt: skip
    assert result.code == 0 and "3 prompts: a first run, 2 of their prefill, 2 of all tokens\n" in result.err
    llm = counting.instances[0]
    assert llm.fields == {"model": "m", "dtype": "float32"} and llm.is_shut_down
    shapes = [(len(prompts), params.max_tokens) for prompts, params in llm.batches]
    assert shapes == [(1, 4), (1, 1), (1, 1), (1, 4), (1, 4), (3, 4), (3, 1), (3, 1), (3, 4), (3, 4)]
    assert all(params.ignore_eos and params.temperature == 0 for _, params in llm.batches)
    prompts = [tuple(prompt) for batch, _ in llm.batches for prompt in batch]
    assert all(len(prompt) == 5 for prompt in prompts) and len(set(prompts)) == len(prompts), "a prefix could be shared"

    document = json.loads(file.read_text())
    assert document["benchmark"] == "throughput" and document["config"]["dtype"] == "float32"
    for row, streams in zip(document["results"], (1, 3), strict=True):
        assert row["num_prompts"] == streams
        assert row["output_tokens_per_s"] == pytest.approx(streams * 4 / row["duration_s"])


def test_decodes_that_took_no_time_have_no_speed(cli, counting, monkeypatch, tmp_path: Path) -> None:
    module = import_module("jaxllm.cli.bench")
    monkeypatch.setattr(module, "timed_generate", lambda *_: 0.25)
    file = tmp_path / "result.json"
    lengths = ("--input-len", "5", "--output-len", "4")
    assert cli("bench", "throughput", "m", "--num-streams", "1", *lengths, "--json", str(file)).code == 0
    (row,) = json.loads(file.read_text())["results"]
    assert row["decode_tokens_per_s"] is None and row["requests_per_s"] == 4.0


def test_a_request_that_does_not_fit_is_refused_before_measuring(cli, counting) -> None:
    result = cli("bench", "latency", "--input-len", "60", "--output-len", "5")
    assert result.code == 2
    assert result.err == "jaxllm: error: --input-len 60 and --output-len 5 make 65 tokens; the context holds 64\n"
    assert counting.instances[0].is_shut_down and not counting.instances[0].batches


def test_latency_warms_up_and_then_measures(cli, counting, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    arguments = ["--batch-size", "2", "--output-len", "4", "--num-iters", "3", "--num-iters-warmup", "1"]
    assert cli("bench", "latency", *arguments, "--json", str(file)).code == 0
    assert [len(prompts) for prompts, _ in counting.instances[0].batches] == [2] * 4
    assert set(json.loads(file.read_text())["results"][0]["latency_s"]) == {"mean", "p50", "p90", "p99", "max"}


def test_serve_measures_a_running_server(cli, server_url: str, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    result = cli(
        "bench", "serve", "--url", server_url, "--num-prompts", "6", "--input-len", "8", "--output-len", "5",
        "--max-concurrency", "3", "--vocab-size", "250", "--json", str(file),
    )  # fmt: skip
    assert result.code == 0, result.err
    row = json.loads(file.read_text())["results"][0]
    assert (row["completed"], row["failed"], row["prompt_tokens"], row["output_tokens"]) == (6, 0, 48, 30)
    # the server waits 10 ms before each of five tokens, and three of the six requests run at a time
    assert row["tpot_ms"]["p50"] > 6 and row["itl_ms"]["p50"] > 6 and row["duration_s"] > 0.095
    assert row["ttft_ms"]["p50"] < row["e2e_ms"]["p50"]


def test_serve_says_what_the_server_refused(cli, server_url: str) -> None:
    result = cli(
        "bench",
        "serve",
        "--base-url",
        f"{server_url}/v1",
        "--num-prompts",
        "2",
        "--input-len",
        "8",
        "--output-len",
        "5",
    )
    assert result.code == 2
    assert "2 of 2 requests failed; the first: the server answered 400" in result.err
    assert "ids go from 0 to 299" in result.err


def test_a_child_process_gets_exactly_the_configuration(tmp_path: Path, monkeypatch) -> None:
    """The file is the only source: the parent's variables are already merged into it, and it may hold an API key."""
    monkeypatch.setenv("JAXLLM_DTYPE", "float16")
    config = EngineConfig(model="/no/such/model", seed=5)
    with server.child(["generate", "hi"], config, stdout=-3) as (running, log):
        settings = Path(running.args[running.args.index("--config") + 1])
        assert settings.read_text() == "model: /no/such/model\nseed: 5\n"
        assert stat.S_IMODE(settings.parent.stat().st_mode) == 0o700
        running.terminate()
        running.wait()
    assert not settings.exists() and not log.exists()


def test_a_child_runs_the_instruction_set_that_is_forced(monkeypatch) -> None:
    monkeypatch.setenv("JAXLLM_CPU_ISA", "avx2")
    with server.child(["generate", "hi"], EngineConfig(model="/no/such/model"), stdout=-3) as (running, _):
        place = Path(f"/proc/{running.pid}/environ")
        while not (environment := place.read_bytes()):  # it is empty for a moment after the program has begun
            assert running.poll() is None
        running.wait()
    assert b"JAXLLM_CPU_ISA=avx2" in environment.split(b"\0")


def test_a_child_that_fails_is_quoted(tmp_path: Path) -> None:
    with (
        server.child(["generate", "hi", "--port", "1"], EngineConfig(), stdout=-3) as (running, log),
        pytest.raises(ConfigError, match="exit code 2: Unknown option: --port"),
    ):
        running.wait()
        raise server.failure(running, log)


@pytest.mark.parametrize(("left", "compiled"), [("0.0", True), ("3.0", False)])
def test_a_server_of_its_own_is_measured_once_it_has_compiled(
    monkeypatch: pytest.MonkeyPatch, left: str, compiled: bool
) -> None:
    def answer(url: str, timeout: float) -> httpx.Response:
        metrics = (
            f'jaxllm:num_requests_running{{model_name="m"}} 5.0\njaxllm:compiles_pending{{model_name="m"}} {left}\n'
        )
        return httpx.Response(200, text=metrics if url.endswith("/metrics") else "", request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", answer)
    assert server._compiled("http://server") is compiled


class Alphabet:
    """One token a letter, and a token that begins texts."""

    bos_token_id = 0

    def encode(self, text: str) -> list[int]:
        return [0, *(ord(letter) - 96 for letter in text)]


def test_speculation_sets_the_number_of_streams_itself(cli) -> None:
    status, _, errors = cli("bench", "speculation", "tiny", "--max-num-seqs", "2")
    assert status == 2 and errors.strip().endswith("max_num_seqs is 2, and here num_streams sets it; leave it out")


def test_windows_of_a_text_each_begin_as_a_text_does() -> None:
    llm = SimpleNamespace(get_tokenizer=Alphabet)
    assert list(windows(llm, "abcdefgh", 4, 100)) == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 7, 8]]
    assert list(windows(llm, "abcdefgh", 4, 5)) == [[0, 1, 2, 3], [0, 4, 5]]


def test_perplexity_is_that_of_the_tokens_after_the_first(cli, monkeypatch, tmp_path: Path) -> None:
    class Certain:
        """Gives every token the probability 1/4, or 1/8 where weights are int4."""

        def __init__(self, **fields):
            self.chance = 8 if fields.get("isq") == "int4" else 4

        def get_tokenizer(self):
            return Alphabet()

        def generate(self, prompts, params, use_tqdm):
            logprob = SimpleNamespace(logprob=-math.log(self.chance))
            assert params.prompt_logprobs == 0
            return [SimpleNamespace(prompt_logprobs=[None, *({t: logprob} for t in ids[1:])]) for ids in prompts]

        def shutdown(self):
            pass

    monkeypatch.setattr("jaxllm.llm.LLM", Certain)
    monkeypatch.setattr(
        "jaxllm.engine.start.blueprint.plan_engine",
        lambda config: SimpleNamespace(weight_bytes=2**20 if config.isq else 4 * 2**20, num_parameters=2**21),
    )
    text, file = tmp_path / "text.txt", tmp_path / "result.json"
    text.write_text("abcdefgh")
    arguments = ["m", "--schemes", "int4", "--window", "4", "--text", str(text), "--json", str(file)]
    assert cli("bench", "perplexity", *arguments).code == 0
    plain, quantized = json.loads(file.read_text())["results"]
    assert (plain["weights"], plain["perplexity"]) == ("float", pytest.approx(4))
    assert (quantized["weights"], quantized["perplexity"]) == ("int4", pytest.approx(8))
    assert (quantized["difference_percent"], quantized["bits_per_weight"]) == (pytest.approx(100), pytest.approx(4))
    assert quantized["tokens_scored"] == 8


def test_an_unknown_scheme_is_refused_before_anything_is_measured(cli) -> None:
    result = cli("bench", "perplexity", "m", "--schemes", "q8_0,q9")
    assert result.code == 2 and "isq is 'q9'" in result.err and "'q8_0'" in result.err
