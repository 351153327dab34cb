"""OpenAI's SDK and llama.cpp's field choose adapters of a real engine, whose answers are those of the merged model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from jaxllm import LLM, AsyncLLM, SamplingParams
from jaxllm.cli.convert.conversion import convert_model
from jaxllm.config import EngineConfig
from tests.reference.peft_adapters import ADAPTERS, load_adapter_golden, write_adapter
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS
from tests.test_adapters import ADAPTED

pytestmark = pytest.mark.programs

PROMPT = load_adapter_golden("plain").prompt_token_ids
TOKENS = 6
NAMES = ("plain", "one_layer")
Said = list[float]
"""The log-probabilities of an answer's tokens, which are those of no other model."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(ADAPTERS["plain"].base, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {name: str(write_adapter(name, tmp_path_factory.mktemp(name))) for name in NAMES}


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(model=str(model), **ADAPTED)
    yield engine
    engine.shutdown()


@pytest.fixture
def client(engine: AsyncLLM, listen: Callable[..., str], adapters: dict[str, str]) -> Iterator[openai.OpenAI]:
    modules = [f"{name}={path}" for name, path in adapters.items()]
    with openai.OpenAI(base_url=f"{listen(engine, enable_lora=True, lora_modules=modules)}/v1", api_key="x") as client:
        yield client


@pytest.fixture(scope="module")
def merged(model: Path, adapters: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Said]:
    """What the model says with adapters merged into it, each given as PATH=SCALE."""

    def merged(*given: str) -> Said:
        folder = tmp_path_factory.mktemp("merged") / "model"
        config = EngineConfig(model=str(model), dtype="float32", skip_tokenizer_init=True)
        convert_model(config, folder, "safetensors", merge_lora=given)
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
        with LLM(folder, **FIELDS) as llm:
            [output] = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs
        return [step[token].logprob for token, step in zip(output.token_ids, output.logprobs or (), strict=True)]

    return merged


def said(client: openai.OpenAI, model: str, **fields: object) -> Said:
    body = {"temperature": 0, "max_tokens": TOKENS, "logprobs": 0}
    completion = client.completions.create(
        model=model,
        prompt=PROMPT,
        extra_body={"ignore_eos": True} | fields,
        **body,  # type: ignore[arg-type]
    )
    logprobs = completion.choices[0].logprobs
    assert completion.model == model and logprobs is not None and logprobs.token_logprobs is not None
    return logprobs.token_logprobs


def test_an_adapter_is_a_model_by_its_name(client, merged, adapters) -> None:
    parents = {one.id: getattr(one, "parent", None) for one in client.models.list()}
    assert parents == {"fake": None, "plain": "fake", "one_layer": "fake"}
    plain, base = said(client, "plain"), said(client, "fake")
    assert plain == pytest.approx(merged(adapters["plain"]), abs=2e-4)
    assert base == pytest.approx(merged(), abs=2e-4)
    assert said(client, "one_layer") == pytest.approx(merged(adapters["one_layer"]), abs=2e-4)
    assert plain != pytest.approx(base, abs=1e-2)


def test_llama_cpps_field_uses_several_at_once(client, merged, adapters) -> None:
    numbers = {one["name"]: one["id"] for one in httpx.get(f"{client.base_url}lora-adapters").json()}
    lora = [{"id": numbers["plain"], "scale": 0.5}, {"id": numbers["one_layer"], "scale": 1.5}]
    both = merged(f"{adapters['plain']}=0.5", f"{adapters['one_layer']}=1.5")
    assert said(client, "fake", lora=lora) == pytest.approx(both, abs=2e-4)
    assert said(client, "fake") == pytest.approx(merged(), abs=2e-4)


def test_one_that_is_loaded_in_the_place_of_another_answers_anew(client, merged, tmp_path) -> None:
    folder = write_adapter("one_layer", tmp_path / "changing")
    body = {"lora_name": "changing", "lora_path": str(folder)}
    assert client.post("/load_lora_adapter", body=body, cast_to=str).startswith("Success: LoRA adapter 'changing'")
    assert said(client, "changing") == pytest.approx(merged(str(folder)), abs=2e-4)
    write_adapter("regex", folder)  # other files in the same folder, the prompt's pages in the prefix cache
    client.post("/load_lora_adapter", body=body | {"load_inplace": True}, cast_to=str)
    assert said(client, "changing") == pytest.approx(merged(str(folder)), abs=2e-4)
    client.post("/unload_lora_adapter", body={"lora_name": "changing"}, cast_to=str)
    with pytest.raises(openai.NotFoundError, match="model 'changing' is not served here"):
        said(client, "changing")


def test_what_the_engine_cannot_use_is_told_to_who_loads_it(client, tmp_path) -> None:
    with pytest.raises(openai.BadRequestError, match=r"adapter 'head' cannot be used: .*replaces 'lm_head"):
        body = {"lora_name": "head", "lora_path": str(write_adapter("head", tmp_path / "head"))}
        client.post("/load_lora_adapter", body=body, cast_to=str)
