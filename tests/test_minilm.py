"""all-MiniLM-L6-v2 with its real weights, against what its publishers and transformers say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxllm import LLM
from tests.reference import GOLDENS
from tests.reference.tiny import write_checkpoint
from tests.serving.pooling.test_encoders import write_tokenizer

MODEL = "all-minilm-l6-v2"
TEXTS = json.loads((GOLDENS / "all-minilm-l6-v2.json").read_text())["texts"]
PUBLISHED = [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]]
"""Of these texts, in sentence-transformers' documentation (https://sbert.net/docs/quickstart.html)."""


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("auto", 3e-3)])
def test_vectors_and_their_likeness(dtype: str, tolerance: float):
    settings = {"max_num_batched_tokens": 32, "prefill_buckets": (32,), "max_num_seqs": 4, "enforce_eager": True}
    with LLM(MODEL, dtype=dtype, **settings) as llm:
        outputs = llm.embed([entry["text"] for entry in TEXTS], use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == [entry["token_ids"] for entry in TEXTS]
    vectors = np.array([output.outputs.embedding for output in outputs])
    np.testing.assert_allclose(vectors, [entry["vector"] for entry in TEXTS], atol=tolerance)
    np.testing.assert_allclose(vectors @ vectors.T, PUBLISHED, atol=max(tolerance, 6e-5))


@pytest.mark.slow
def test_the_example_finds_the_passage(tmp_path: Path):
    """The cross-encoder is a small random one, whose two scores say nothing."""
    reranker = write_checkpoint("bert_classifier", tmp_path)
    write_tokenizer(reranker)
    root = Path(__file__).parents[1]
    command = [sys.executable, "examples/semantic_search.py", MODEL, str(reranker)]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 4 and "Paris is the capital of France." in lines[0]
