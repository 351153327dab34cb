"""A head does for those who need less than it can, while the one that fits them is not compiled yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm import LLM, SamplingParams
from jaxllm.engine.core.keys import Key
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS


def test_one_with_a_mask_lets_requests_without_grammar_choose_any_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = FIELDS | {"enforce_eager": False}
    params = SamplingParams(temperature=1, seed=1, max_tokens=1)
    with LLM(write_checkpoint("llama_gqa", tmp_path), **fields) as llm:
        expected = llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids
        executables = llm._client()._loop._core._runner.device._executables  # type: ignore[union-attr]
        executables.wait()
        ready = executables._ready

        def masked_alone(key: Key) -> bool:
            return ready(key) and (key.kind != "head" or "grammar" in key.variant)

        monkeypatch.setattr(executables, "_ready", masked_alone)
        assert llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids == expected
