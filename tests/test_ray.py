"""`serve run jaxllm.ray:app` answers as one server, and outlives its replicas. Needs `pip install 'jaxllm[ray]'`."""

from __future__ import annotations

import os
import re
import signal
import string
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from jaxllm import LLM, ConfigError, SamplingParams
from tests.serving.conftest import wait_for
from tests.serving.mixed_requests import write_model
from tests.serving.real_server import engine_process
from tests.sharding.ports import free_port

pytest.importorskip("ray.serve", reason="ray is not installed: make test-ray does that")

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own

START_SECONDS = 240
REPLACE_SECONDS = 120
REQUEST_SECONDS = 60
FIELDS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 8,
    "kv_cache_memory": "16MiB", "decode_buckets": "4", "prefill_buckets": "32", "cpu_kernels": "off", "decode_steps": 1,
}  # fmt: skip
PROGRAM = "from ray.serve.scripts import cli; cli()"


class Fleet:
    """An application that `serve run` has started.

    Attributes:
        ray: the process whose children all others are.
        address: of Ray.
        url: of Ray's proxy.
    """

    def __init__(self, ray: psutil.Process, address: str, port: int):
        self.ray = ray
        self.address = address
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0, timeout=REQUEST_SECONDS)

    def actors(self, name: str) -> list[psutil.Process]:
        """The processes of a deployment, by the titles that Ray gives them."""
        found = []
        for process in self.ray.children(recursive=True):
            try:
                if f"ServeReplica:default:{name}" in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue  # it has just ended
        return found

    def replicas(self) -> list[psutil.Process]:
        return self.actors("RayReplica")

    def is_whole(self, count: int) -> bool:
        """Whether that many replicas run, each with an engine, and answer."""
        there = self.replicas()
        engines = [child for one in there for child in one.children() if "own_process" in " ".join(child.cmdline())]
        return len(there) == len(engines) == count == len(self.generated())

    def complete(self, prompt: Any, **more: Any) -> Any:
        return self.client.completions.create(
            model="tiny",
            prompt=prompt,
            **{"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}} | more,
        )

    def stream(
        self, prompt: str, tokens: int = 190, begun: threading.Semaphore | None = None
    ) -> tuple[str, str | None]:
        """What a stream says, and the code of the error that has ended it, if one has; `begun` is told of its start."""
        text = ""
        try:
            for chunk in self.complete(prompt, max_tokens=tokens, stream=True):
                text += chunk.choices[0].text
                if begun is not None:
                    begun.release()
                    begun = None
        except openai.APIError as error:
            return text, error.code or type(error).__name__
        return text, None

    def generated(self) -> dict[str, float]:
        """Tokens that each replica has generated, by Ray's name for it."""
        shown = httpx.get(f"{self.url}/metrics", timeout=REQUEST_SECONDS).text
        found = re.findall(r'^jaxllm:generation_tokens_total{.*replica="(\w+)"} ([\d.]+)', shown, re.MULTILINE)
        return {name: float(tokens) for name, tokens in found}


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """A Ray of our own on the loopback interface alone: its first process, and its address."""
    address = f"127.0.0.1:{free_port()}"
    command = [
        sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block",
        "--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}", "--num-cpus=4",
        "--include-dashboard=false", "--object-store-memory=100000000", "--disable-usage-stats", "--min-worker-port=0",
        "--max-worker-port=0", "--dashboard-agent-listen-port=0", f"--ray-client-server-port={free_port()}",
    ]  # fmt: skip
    log = folder / "ray.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment())
    started = psutil.Process(process.pid)
    try:
        wait_for(lambda: process.poll() is not None or "Ray runtime started" in log.read_text(), START_SECONDS)
        assert process.poll() is None, log.read_text()[-4000:]
        yield started, address
    finally:
        family = started.children(recursive=True)
        process.terminate()
        psutil.wait_procs([started, *family], 20)
        for one in [started, *family]:
            if one.is_running():
                one.kill()
        process.wait()


def environment() -> dict[str, str]:
    """Ray gives its workers what other programs leave of the processor, unless it is told otherwise."""
    return os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "JAX_PLATFORMS": "cpu"}


@contextmanager
def fleet(folder: Path, model: Path, **arguments: Any) -> Iterator[Fleet]:
    port = free_port()
    own = {
        "model": str(model), "served_model_name": "tiny", "data_dir": str(folder / "data"),
        "compile_cache_dir": os.environ["TESTS_COMPILE_CACHE"],
    }  # fmt: skip
    application = {
        "name": "default", "route_prefix": "/", "import_path": "jaxllm.ray:app", "args": FIELDS | own | arguments,
    }  # fmt: skip
    document = {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [application]}
    file, log = folder / "serve.yaml", folder / "serve.log"
    file.write_text(yaml.safe_dump(document))
    with cluster(folder) as (ray, address), log.open("wb") as output:
        command = [sys.executable, "-c", PROGRAM, "run", f"--address={address}", str(file)]
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment())
        try:
            wait_for(lambda: _is_ready(process, port, log), START_SECONDS)
            started = Fleet(ray, address, port)
            wait_for(lambda: started.is_whole(arguments.get("num_replicas", 1)), START_SECONDS)
            yield started
            family = [*started.actors("RayReplica"), *started.actors("RayFront")]
            family += [child for one in family for child in one.children()]
            process.send_signal(signal.SIGINT)
            process.wait(60)
            _, left = psutil.wait_procs(family, 20)
            assert not left, "processes outlive `serve run`"
        except BaseException:
            print(log.read_text()[-8000:])
            raise
        finally:
            process.kill()
            process.wait()


def _is_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-4000:]
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Fleet]:
    options = {"graceful_shutdown_timeout_s": 30}
    with fleet(
        tmp_path_factory.mktemp("two"), model, num_replicas=2, prefix_affinity=True, replica_options=options
    ) as started:
        yield started


def test_texts_are_those_of_an_engine_alone_streamed_and_whole(two: Fleet, model: Path) -> None:
    llm = LLM(str(model), enforce_eager=True, **FIELDS)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [f"The pages of sequence {number}" for number in range(6)]
    expected = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    llm.shutdown()
    assert [two.complete(prompt).choices[0].text for prompt in prompts] == expected
    for prompt, text in zip(prompts, expected, strict=True):
        pieces = [chunk.choices[0].text for chunk in two.complete(prompt, stream=True)]
        assert "".join(pieces) == text and len(pieces) > 4


def test_errors_are_those_of_the_server(two: Fleet) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        two.complete("Hi", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="no route"):
        two.client.get("/nothing", cast_to=object)
    anthropic = httpx.post(f"{two.url}/v1/messages", json={"model": "tiny"}, timeout=REQUEST_SECONDS)
    assert anthropic.status_code == 400 and anthropic.json()["type"] == "error"
    large = httpx.post(f"{two.url}/v1/completions", content=b" " * (17 * 2**20), timeout=REQUEST_SECONDS)
    assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"


def test_no_process_of_ray_s_but_the_engines_loads_jax(two: Fleet) -> None:
    (front,) = two.actors("RayFront")
    assert not any("jaxlib" in mapped.path for mapped in front.memory_maps())
    engines = [engine_process(replica) for replica in two.replicas()]
    assert len(engines) == 2 and all(any("jaxlib" in m.path for m in one.memory_maps()) for one in engines)


def test_prompts_that_begin_alike_meet_their_cache(two: Fleet) -> None:
    prefixes = [" ".join(f"{word} {number}" for number in range(30)) for word in ("tokens", "pages", "steps", "slots")]
    cached = []
    for turn in range(5):
        for prefix in prefixes:
            usage = two.complete(f"{prefix} {turn}", max_tokens=1).usage
            cached.append(usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens)
    assert max(cached[:4]) < 0.1
    assert min(cached[4:]) > 0.8, "each went to the replica that had its beginning"


def test_metrics_and_changes_are_of_all_replicas(two: Fleet) -> None:
    generated = two.generated()
    assert len(generated) == 2 and all(generated.values())
    prompt = "A prompt that is long enough for a page or two of the cache, and some more words"
    assert two.complete(prompt).usage.prompt_tokens_details.cached_tokens == 0
    assert two.complete(prompt).usage.prompt_tokens_details.cached_tokens > 0
    reset = httpx.post(f"{two.url}/reset_prefix_cache", timeout=REQUEST_SECONDS)
    assert reset.status_code == 200, reset.text
    assert two.complete(prompt).usage.prompt_tokens_details.cached_tokens == 0


def test_a_client_that_leaves_ends_its_request(two: Fleet) -> None:
    with httpx.stream(
        "POST", f"{two.url}/v1/completions", timeout=REQUEST_SECONDS,
        json={"model": "tiny", "prompt": "Hi", "max_tokens": 230, "ignore_eos": True, "stream": True},
    ) as response:  # fmt: skip
        next(response.iter_raw())

    def idle() -> bool:
        return all(httpx.get(f"{two.url}/load", timeout=5).json()["server_load"] == 0 for _ in range(8))

    wait_for(idle, 20)


@pytest.mark.parametrize("what", ["replica", "engine"])
def test_one_dies_and_the_other_answers_until_it_is_replaced(two: Fleet, what: str) -> None:
    expected, owners = {}, {}
    for letter in string.ascii_letters:
        prompt, before = f"{what[0]}{letter} " * 12, two.generated()
        text, _ = two.stream(prompt)
        (owner,) = (name for name, tokens in two.generated().items() if tokens > before[name])
        counts = Counter(owners.values())
        if counts[owner] < 2:  # so few that the router's balance does not come before a prefix
            expected[prompt], owners[prompt] = text, owner
        if len(owners) == 4:
            break
    there, victim = two.replicas(), two.replicas()[0]
    engine = engine_process(victim)
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(len(expected)) as pool:
        asked = {prompt: pool.submit(two.stream, prompt, begun=begun) for prompt in expected}
        for _ in asked:
            assert begun.acquire(timeout=REQUEST_SECONDS)
        (victim if what == "replica" else engine).send_signal(signal.SIGKILL)
        struck = time.monotonic()
        answers = {prompt: one.result() for prompt, one in asked.items()}
        ended = time.monotonic() - struck
    for prompt, (text, code) in answers.items():
        assert text == expected[prompt] if code is None else expected[prompt].startswith(text)
    codes = {
        owner: [answers[prompt][1] for prompt in owners if owners[prompt] == owner] for owner in set(owners.values())
    }
    (survivor,) = (owner for owner, ends in codes.items() if not any(ends))
    (dead,) = (ends for owner, ends in codes.items() if owner != survivor)
    assert set(dead) - {None} == {"engine_dead"}
    psutil.wait_procs([engine], 20)
    assert not engine.is_running(), "no engine outlives its server"

    failed = 0
    while True:
        again = [two.stream(prompt) for prompt in expected]
        failed += sum(code is not None for _, code in again)
        if two.is_whole(len(there)) and again == [(text, None) for text in expected.values()]:
            break
        assert time.monotonic() - struck < REPLACE_SECONDS, "it was not replaced"
    print(
        f"{what}: {dead.count('engine_dead')} of {len(answers)} streams ended with engine_dead, all within {ended:.1f} "
        f"s; {failed} later ones failed; whole after {time.monotonic() - struck:.1f} s"
    )


def test_requests_end_before_the_application_does(two: Fleet) -> None:
    expected = two.stream("The last words")
    begun = threading.Semaphore(0)
    delete = (
        f"import ray; from ray import serve; ray.init('{two.address}', log_to_driver=False); serve.delete('default')"
    )
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(two.stream, "The last words", begun=begun)
        assert begun.acquire(timeout=REQUEST_SECONDS)
        subprocess.run([sys.executable, "-c", delete], env=environment(), check=True, timeout=REQUEST_SECONDS)
        assert asked.result() == expected
    wait_for(lambda: not two.replicas() and not two.actors("RayFront"), 60)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modle": "x"}, "unknown argument 'modle'; did you mean 'model'?"),
        ({"max_model_len": "many"}, "max_model_len is 'many'"),
        ({"port": "9000"}, "port is 9000, and Ray's proxy listens here"),
        ({"num_processes": 2, "process_id": 0}, "num_processes is 2; a replica on Ray is one process"),
        ({"multi_process": True, "tensor_parallel_size": 2}, "multi_process is True; a replica on Ray is one process"),
        ({"num_replicas": "0"}, "num_replicas is '0'"),
        ({"replica_options": '{"num_gpus": 1}'}, "replica_options is {'num_gpus': 1}: "),
        ({"ray": "false"}, "ray is False, and this is the application that runs on Ray"),
        ({"lameduck": "3"}, "lameduck is 3.0, and Ray's proxy listens here"),
        ({"replica_options": {"autoscaling_config": {"max_replicas": 0}}}, "replica_options is "),
        ({"num_replicas": 2, "replica_options": {"num_replicas": 2}}, "num_replicas is in replica_options"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(arguments: dict[str, Any], message: str) -> None:
    from jaxllm.ray import app

    with pytest.raises(ConfigError) as refused:
        app(arguments)
    assert re.match(re.escape(message), str(refused.value)), refused.value
    assert "\n" not in str(refused.value)


def test_our_own_command_starts_the_same(tmp_path: Path, model: Path) -> None:
    """It ends with its requests; what `serve run` has open it cuts off."""
    llm = LLM(str(model), enforce_eager=True, **FIELDS)
    params = SamplingParams(temperature=0, max_tokens=190, ignore_eos=True)
    expected = llm.generate(["The last words"], params, use_tqdm=False)[0].outputs[0].text
    llm.shutdown()
    port, log = free_port(), tmp_path / "serve.log"
    own = {
        "port": port, "served_model_name": "tiny", "num_replicas": 1, "data_dir": tmp_path / "data",
        "compile_cache_dir": os.environ["TESTS_COMPILE_CACHE"],
        "replica_options": '{"graceful_shutdown_timeout_s": 30}',
    }  # fmt: skip
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (FIELDS | own).items()]
    command = [sys.executable, "-m", "jaxllm", "serve", str(model), "--ray", *flags]
    with cluster(tmp_path) as (ray, address), log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment() | {"RAY_ADDRESS": address})
        try:
            wait_for(lambda: _is_ready(process, port, log), START_SECONDS)
            started = Fleet(ray, address, port)
            family = [*started.replicas(), *started.actors("RayFront")]
            family += [child for one in family for child in one.children()]
            begun = threading.Semaphore(0)
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(started.stream, "The last words", begun=begun)
                assert begun.acquire(timeout=REQUEST_SECONDS)
                process.send_signal(signal.SIGTERM)
                assert asked.result() == (expected, None)
            assert process.wait(60) == 0
            _, left = psutil.wait_procs(family, 20)
            assert not left
        except BaseException:
            print(log.read_text()[-8000:])
            raise
        finally:
            process.kill()
            process.wait()


def test_our_own_command_says_in_a_line_why_no_replica_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jaxllm", "serve", str(tmp_path / "nothing"), "--ray", f"--port={free_port()}"]
    with cluster(tmp_path) as (_, address):
        ended = subprocess.run(
            command, env=environment() | {"RAY_ADDRESS": address}, capture_output=True, text=True, timeout=START_SECONDS
        )
    assert ended.returncode == 2
    said = ended.stderr.strip().splitlines()[-1]
    assert said.startswith("jaxllm: error: Ray could not start the replicas: ") and str(tmp_path / "nothing") in said


def test_settings_come_from_variables_and_a_file_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from jaxllm.ray import app

    file = tmp_path / "serve.yaml"
    file.write_text("max_model_len: 128\nreplica_options: {autoscaling_config: {min_replicas: 1, max_replicas: 3}}\n")
    monkeypatch.setenv("JAXLLM_MODEL", "gemma3-270m")
    monkeypatch.setenv("JAXLLM_PREFIX_AFFINITY", "true")
    config = (
        app({"config": str(file), "max_num_seqs": "5"})._bound_deployment.init_args[0]._bound_deployment.init_args[0]
    )
    assert (config.model, config.max_model_len, config.max_num_seqs) == ("gemma3-270m", 128, 5)
    assert config.prefix_affinity
