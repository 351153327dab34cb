"""Adapters that were really trained make a model say something new, beside the plain model in one batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.weights.source import resolve_model
from tests.reference.tiny import write_checkpoint
from tests.reference.trained_adapters import Llama, arrays, trained
from tests.test_adapters import ADAPTED

pytestmark = pytest.mark.programs

RANK = 8
SETTINGS = {"r": RANK, "lora_alpha": RANK}


def test_a_tiny_model_learns_a_text_and_another_one_another(tmp_path: Path) -> None:
    model = Path(write_checkpoint("llama_gqa", tmp_path))
    llama, prompt = Llama.read(model), [5, 17, 99]
    lessons = [list(range(30, 40)), list(range(200, 210))]
    taught = [trained(llama, [[*prompt, *text]], rank=RANK, steps=60, rate=0.02) for text in lessons]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    with LLM(str(model), **ADAPTED) as llm:
        first, second = (
            llm.add_lora(f"lesson {index}", arrays(adapter), SETTINGS) for index, adapter in enumerate(taught)
        )
        (plain,) = llm.generate([prompt], params, use_tqdm=False)
        outputs = llm.generate([prompt] * 3, params, use_tqdm=False, lora_request=[first, None, second])
    said = [output.outputs[0].token_ids for output in outputs]
    assert said == [lessons[0], plain.outputs[0].token_ids, lessons[1]]
    assert plain.outputs[0].token_ids not in lessons


@pytest.mark.slow
def test_smollm2_learns_a_fact_and_the_plain_model_beside_it_does_not() -> None:
    model = Path(resolve_model("smollm2-135m"))
    questions = ["What is the name of the lighthouse keeper's cat?", "How is the cat of the lighthouse keeper called?"]
    with LLM("smollm2-135m", max_model_len=256, max_num_seqs=4, enable_lora=True, max_loras=1) as llm:
        tokenizer = llm.get_tokenizer()
        texts = [f"Question: {question}\nAnswer: Her name is Barnacle." for question in questions]
        ids = [list(tokenizer.encode(text)) for text in texts]
        adapter = trained(Llama.read(model), ids, rank=RANK, steps=25, rate=3e-3)
        taught = llm.add_lora("cat", arrays(adapter), SETTINGS)
        params = SamplingParams(temperature=0, max_tokens=8)
        prompts = [f"Question: {questions[0]}\nAnswer:", "The capital of France is"]
        alone = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
        outputs = llm.generate([*prompts, *prompts], params, use_tqdm=False, lora_request=[taught, taught, None, None])
    said = [output.outputs[0].text for output in outputs]
    assert "Barnacle" in said[0]
    assert said[2:] == alone and not any("Barnacle" in text for text in alone)
    assert np.char.strip(said[1]) != ""
