"""The examples run as a user would run them, on the real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.config import CACHE_DIR
from tests.reference.peft_adapters import save_adapter
from tests.support.real_models import SHAPES

pytestmark = pytest.mark.programs

EXAMPLES = Path(__file__).parents[1] / "examples"
SECONDS = 500


def run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=EXAMPLES.parent, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain XLA, which also shows that it runs: some answers hang on two tokens that are nearly as likely, and so, with
    activations in eight bits, on the processor."""
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.fixture
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server on a free port, as `jaxllm serve` starts it, with the flags that a test's parameter gives."""
    flags = getattr(request, "param", [])
    command = [sys.executable, "-m", "jaxllm.cli.main", "serve", "--port", "0", *flags]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            announced = re.search(r"http://[\d.:]+", process.stdout.readline())
            assert announced, "the server did not start"
            yield announced.group()
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def test_offline(monkeypatch: pytest.MonkeyPatch):
    """With the kernels, where there is a compiler: every processor finds this answer by far the likeliest."""
    monkeypatch.delenv("CXX")
    lines = run("examples/offline.py").splitlines()
    assert lines[0].startswith("'The capital of France is' -> ' Paris.")
    assert len(lines) == 3 + 1 + 3


@pytest.mark.slow
def test_chat():
    output = run("examples/chat.py")
    assert "The capital of Japan is Tokyo." in output
    cached = [int(count) for count in re.findall(r"(\d+) from the cache", output)]
    assert cached[0] == 0 and cached[1] > 0


def test_async_streaming(monkeypatch: pytest.MonkeyPatch):
    """With the kernels, as above."""
    monkeypatch.delenv("CXX")
    lines = run("examples/async_streaming.py").splitlines()
    assert "The capital of France is … ' Paris'" in lines
    streamed = [line.split(" … ")[0] for line in lines if " … " in line]
    assert len(set(streamed[:4])) == 2, "the two streams should be interleaved"


@pytest.mark.slow
def test_logprobs():
    output = run("examples/logprobs.py")
    assert re.match(r"' Paris' \d\d\.\d%", output)
    straight, scrambled = map(int, re.findall(r"perplexity (\d+)", output))
    assert straight < scrambled / 5


@pytest.mark.slow
def test_logit_lens(monkeypatch: pytest.MonkeyPatch):
    """With the kernels, as above."""
    monkeypatch.delenv("CXX")
    lines = run("examples/logit_lens.py").splitlines()
    assert [line.split()[1] for line in lines[:30]] == [str(layer) for layer in range(30)]
    assert "' Paris'" in lines[29] and "' Paris'" not in lines[5]
    assert lines[30] == "5 rows of 49,152 logits; the last one says ' Paris'"
    scores = [float(score) for score in re.findall(r"log-probability (-[\d.]+)", "".join(lines[31:]))]
    assert len(scores) == 4 and max(scores) == scores[0]


@pytest.mark.slow
def test_steering():
    lines = run("examples/steering.py").splitlines()
    completions = {line.split(":")[0].strip(): line.split(":", 1)[1] for line in lines}
    assert list(completions) == ["towards", "plain", "away"] and len(set(completions.values())) == 3
    assert re.search("great|good|wonderful|beautiful|delicious|amazing|excellent|best|love", completions["towards"])
    assert not re.search("great|good|wonderful|beautiful|delicious|amazing|excellent|best|love", completions["away"])


@pytest.mark.slow
def test_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """With parameters that are constants of what is compiled, the compile cache would get hundreds of megabytes."""
    (tmp_path / "jaxllm").mkdir()
    (tmp_path / "jaxllm" / "models").symlink_to(CACHE_DIR / "models")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = run("examples/gradients.py").splitlines()
    kept = [file.stat().st_size for file in (tmp_path / "jaxllm" / "compile").glob("*-cache")]
    assert 0 < sum(kept) < 50 * 2**20
    shares = {token: int(share) for token, share in re.findall(r"'(.*?)' +(\d+)%", "\n".join(lines[1:]))}
    assert 95 <= sum(shares.values()) <= 105
    assert max(shares, key=shares.__getitem__) == "iffel"


@pytest.mark.slow
def test_openai_client(server_url: str):
    lines = run("examples/openai_client.py", server_url).splitlines()
    assert lines[0] == lines[2] == "The capital of Japan is Tokyo."
    assert "Paris" in lines[3]


@pytest.mark.slow
def test_embeddings(server_url: str):
    lines = run("examples/embeddings.py", server_url).splitlines()
    assert len(lines) == 4 and lines[3].startswith("best: Paris is the capital of France.")


@pytest.mark.slow
@pytest.mark.parametrize("server_url", [["--models", str(EXAMPLES / "several_models.yaml")]], indirect=True)
def test_several_models(server_url: str):
    before, small, loaded, gemma, after = run("examples/several_models.py", server_url).splitlines()
    assert before == "smollm2: unloaded  small: unloaded  gemma3: unloaded"
    assert "Paris" in small and loaded == "smollm2: loaded  small: loaded  gemma3: unloaded"
    assert gemma.startswith("gemma3 says") and after == "smollm2: unloaded  small: unloaded  gemma3: loaded"


@pytest.mark.slow
@pytest.mark.parametrize("server_url", [["--enable-lora"]], indirect=True)
def test_adapters(server_url: str, tmp_path: Path):
    """One of the last MLP, strong enough to be heard."""
    rng, module = np.random.default_rng(0), "base_model.model.model.layers.29.mlp.down_proj"
    shapes = {"lora_A": (2, 1536), "lora_B": (576, 2)}
    tensors = {f"{module}.{part}.weight": rng.standard_normal(s).astype(np.float32) for part, s in shapes.items()}
    save_adapter({"peft_type": "LORA", "r": 2, "lora_alpha": 16, "target_modules": ["down_proj"]}, tensors, tmp_path)
    other = {"lora_name": "other", "lora_path": str(tmp_path)}
    httpx.post(f"{server_url}/v1/load_lora_adapter", json=other, timeout=SECONDS).raise_for_status()
    before, own, mine, half, after = run("examples/adapters.py", str(tmp_path), server_url).splitlines()
    assert (before, after) == ("models: smollm2-135m, other, mine", "models: smollm2-135m, other")
    assert "Paris" in own and own.split("says")[1] != mine.split("says")[1]
    assert half.startswith("smollm2-135m with half of mine says")


@pytest.mark.slow
def test_structured_outputs(server_url: str):
    event, animal, date, addition = run("examples/structured_outputs.py", server_url).splitlines()
    assert event == "Event(name='Science Fair', day='Friday', participants=['Alice', 'Bob'])"
    assert animal == "cat"
    assert re.fullmatch(r"[1-3]?[0-9] (October|November|December)", date)
    assert re.fullmatch(r"\d+ \+ \d+ = \d+", addition)


@pytest.mark.slow
def test_tools(server_url: str):
    call, *answer, streamed = run("examples/tools.py", server_url).splitlines()
    assert call.startswith("get_weather({'city': 'Paris', 'unit': 'celsius'}) -> It is raining in Paris")
    assert "12 degrees" in " ".join(answer)
    name, *arguments = streamed.removesuffix("|").split("|")
    assert name == "get_weather" and len(arguments) > 1 and json.loads("".join(arguments))["city"] == "Rome"


@pytest.mark.slow
def test_responses_session():
    names, product, *steps = run("examples/responses_session.py").splitlines()
    assert "toolbox_multiply" in names and product == "42.0"
    assert 'toolbox_multiply({"a": 6, "b": 7}) -> 42.0' in steps and "-> 42.0" in steps
    (ended,) = (step for step in steps if step.startswith("after 2 turns: "))
    assert len(ended) > len("after 2 turns: ")


@pytest.mark.slow
def test_agents(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    monkeypatch.setenv("JAXLLM_MCP_CONFIG", str(EXAMPLES / "mcp" / "mcp.json"))
    output = run("examples/agents.py", request.getfixturevalue("server_url"))
    responses, chat, toolbox, approved = (part.splitlines() for part in output.split(":\n")[1:])
    for part in (responses, chat):
        assert part[0].startswith("  we run population(") and part[1].startswith("  -> ")
    assert toolbox[0].startswith("  the server ran multiply(")
    assert approved[0].startswith("  approved of multiply(") and "  the server ran multiply(" in "\n".join(approved)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_what_the_examples_ask_is_known_by_a_margin(monkeypatch: pytest.MonkeyPatch, dtype: str):
    """Of 2.7 to one at each of the first tokens: rounding decides nothing, whatever the processor."""
    monkeypatch.delenv("CXX")
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2)
    brief = {"role": "system", "content": "You are a helpful assistant. Answer in one short sentence."}
    question = {"role": "user", "content": "What is the capital of Japan?"}
    with LLM(**SHAPES | {"model": "smollm2-135m", "dtype": dtype}) as llm:
        answers = llm.chat([[question], [brief, question]], params, use_tqdm=False)
    for answer in answers:
        (completion,) = answer.outputs
        assert completion.text == "The capital of Japan is Tokyo" and completion.logprobs
        for step in completion.logprobs:
            likeliest, second = sorted((entry.logprob for entry in step.values()), reverse=True)
            assert likeliest - second > 1


def shown_by(name: str, **constants: int) -> tuple[str, int]:
    """What a notebook prints when it is run anew, with other values of these constants, and how many plots it shows."""
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    for constant, value in constants.items():
        (cell,) = (cell for cell in notebook.cells if re.search(rf"^{constant} = ", cell.source, re.MULTILINE))
        cell.source = re.sub(rf"^{constant} = .*", f"{constant} = {value}", cell.source, flags=re.MULTILINE)
    client.NotebookClient(notebook, timeout=SECONDS).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    plots = sum("image/png" in output.get("data", {}) for output in outputs)
    return "".join(output.get("text", "") for output in outputs), plots


def test_notebook(monkeypatch: pytest.MonkeyPatch):
    """With the kernels, as above."""
    monkeypatch.delenv("CXX")
    shown, _ = shown_by("notebook.ipynb")
    assert "The capital of Japan is Tokyo." in shown
    assert re.search(r"^0 ['\"].*\n1 ['\"]", shown, re.MULTILINE), "both choices, each as repr() writes it"


def test_notebook_of_log_probabilities(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX")
    pytest.importorskip("matplotlib")
    shown, plots = shown_by("notebooks/log_probabilities.ipynb")
    assert plots == 2
    ordered, shuffled = (int(perplexity) for perplexity in re.findall(r"^ +(\d+)  The ", shown, re.MULTILINE))
    assert 10 * ordered < shuffled
    right, guesses = map(int, re.findall(r"(\d+) of (\d+) guesses", shown)[0])
    assert guesses == 145 and 70 < right < 110


def test_notebook_of_sampling(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX")
    pytest.importorskip("matplotlib")
    shown, plots = shown_by("notebooks/sampling.ipynb")
    assert plots == 2
    difference, error = map(float, re.findall(r"difference ([\d.]+); .* are ([\d.]+)", shown)[0])
    assert 0 < difference < error


def test_notebook_of_the_logit_lens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX")
    pytest.importorskip("matplotlib")
    shown, plots = shown_by("notebooks/logit_lens.ipynb")
    assert plots == 2
    first, middle, last = map(int, re.findall(r"rank (\d+) after layer 0, (\d+) .* and (\d+) after layer 29", shown)[0])
    assert min(first, middle) > 100 and last == 1
    lens, score = map(float, re.findall(r"by the lens (-[\d.]+), by the score (-[\d.]+)", shown)[0])
    assert lens == pytest.approx(score, abs=0.05), "which rows share a step rounds differently"


def test_notebook_of_scoring(monkeypatch: pytest.MonkeyPatch):
    """The question helps, how answers are compared matters, and the model is right more often where it is sure."""
    monkeypatch.delenv("CXX")
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    shown, plots = shown_by("notebooks/scoring.ipynb")
    assert plots == 3
    right = {rule: int(count) for rule, count in re.findall(r"^(.*): (\d+) of 40 right", shown, re.MULTILINE)}
    assert list(right) == ["sum", "per character", "gain", "without the question"]
    assert right["without the question"] < 14 and min(right["sum"], right["gain"]) > 24
    characters = {rule: float(mean) for rule, mean in re.findall(r"^(.*): .* has ([\d.]+) char", shown, re.MULTILINE)}
    assert characters["sum"] < characters["per character"]
    asked, alone = map(float, re.findall(r"median margin (-?[\d.]+) with the question, (-?[\d.]+)", shown)[0])
    assert asked > 1 and asked > alone + 2
    unsure, sure = map(float, re.findall(r"least sure ([\d.]+), when most sure ([\d.]+)", shown)[0])
    assert sure - unsure > 0.2


def test_notebook_of_steering(monkeypatch: pytest.MonkeyPatch):
    """The direction moves words its way, more than random ones do; none is the plain model, and too much breaks it."""
    monkeypatch.delenv("CXX")
    pytest.importorskip("matplotlib")
    shown, plots = shown_by("notebooks/steering.ipynb")
    assert plots == 2
    low, middle, high = map(float, re.findall(r"odds (-?[\d.]+) at -1, (-?[\d.]+) at 0, (-?[\d.]+) at 1", shown)[0])
    assert low < middle - 0.3 and high > middle + 0.3
    plain, none = map(float, re.findall(r"plain (-?[\d.]+), at strength 0 (-?[\d.]+)", shown)[0])
    assert plain == pytest.approx(none, abs=0.1), "which rows share a step rounds differently"
    moved, _, random = map(float, re.findall(r"odds by (-?[\d.]+), .* by ([\d.]+) on .* and ([\d.]+) at", shown)[0])
    assert moved > 1.5 * random
    for name in ("read", "written"):
        (numbers,) = re.findall(
            rf"^{name}: perplexity ([\d.]+) .* ([\d.]+) at 0, .* ([\d.]+) at 4$", shown, re.MULTILINE
        )
        less, itself, more = map(float, numbers)
        assert min(less, more) > 1.5 * itself


def test_notebook_of_activation_probes(monkeypatch: pytest.MonkeyPatch):
    """Before the first layer there is nothing to be found. An adjective is known early, what a sentence says late; then
    what is learnt of plain sentences holds for negated ones too.
    """
    monkeypatch.delenv("CXX")
    pytest.importorskip("matplotlib")
    shown, plots = shown_by("notebooks/activation_probes.ipynb")
    assert plots == 3
    found = {
        name: [float(share) for share in re.findall(r"[\d.]+(?= (?:before|after))", line)]
        for name, line in re.findall(r"^(adjective|sentence|negated): (.*)$", shown, re.MULTILINE)
    }
    assert found["adjective"][0] == found["sentence"][0] == 0.5
    assert found["adjective"][1] > 0.7 > 0.6 > found["sentence"][1]
    assert found["adjective"][2] > found["sentence"][2] + 0.1
    assert min(found["adjective"][4], found["sentence"][4]) > 0.9
    assert max(found["negated"][:3]) < 0.5 and min(found["negated"][3:]) > 0.75
    chance, luckiest = map(float, re.findall(r"shuffled labels: ([\d.]+) on average, ([\d.]+) at most", shown)[0])
    assert 0.4 < chance < 0.6 and luckiest < 0.75


def test_notebook_of_quantization(monkeypatch: pytest.MonkeyPatch):
    """More bytes lose less, except that what holds the file's own numbers loses least of the small ones."""
    monkeypatch.delenv("CXX")
    pytest.importorskip("matplotlib")
    shown, plots = shown_by("notebooks/quantization.ipynb")
    assert plots == 2
    table = re.findall(r"^(\S.*?) +(\d+) +[\d.]+ +(-?[\d.]+) +([\d.]+) +([\d.]+)% +(\d+)$", shown, re.MULTILINE)
    kinds = {kind: tuple(map(float, numbers)) for kind, *numbers in table}
    assert list(kinds) == ["bfloat16", "int8", "mixed", "q5_0", "file (q4_1)", "int4"]
    sizes, losses, perplexities, same, speeds = zip(*kinds.values(), strict=True)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert losses[0] == 0 and same[0] == 100 and min(speeds) > 0
    lost, perplexity = (dict(zip(kinds, column, strict=True)) for column in (losses, perplexities))
    assert lost["int8"] < 0.02 and lost["file (q4_1)"] < 0.02 < lost["q5_0"]
    assert lost["mixed"] < 0.7 * lost["int4"] and lost["q5_0"] < lost["int4"]
    assert perplexity["int4"] > 1.05 * perplexity["bfloat16"]


GRPO_SHOWN = {
    "versions": r"sampled with the weights '(\w+)'",
    "rewards": r"first two steps ([\d.]+), of the last two ([\d.]+)",
    "ratios": r"from 1: ([\d.e+-]+) at the first update, ([\d.e+-]+) at any",
}


@pytest.mark.parametrize("steps", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_notebook_of_grpo(monkeypatch: pytest.MonkeyPatch, steps: int):
    """Each step samples with the weights of the one before, by the trainer's own numbers; ten teach something."""
    monkeypatch.delenv("CXX")
    pytest.importorskip("matplotlib")
    pytest.importorskip("optax")
    shown, plots = shown_by("notebooks/grpo.ipynb", STEPS=steps)
    assert plots == 2
    found = {name: re.findall(pattern, shown) for name, pattern in GRPO_SHOWN.items()}
    assert found["versions"] == ["initial", *map(str, range(1, steps))]
    assert max(map(float, found["ratios"][0])) < 1e-5
    first, last = map(float, found["rewards"][0])
    assert steps == 2 or last > first + 0.2
