"""An engine of each tiny model that a module names by its fixture `name`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm import LLM
from tests.reference.tiny import write_checkpoint
from tests.support.sizes import FIELDS
from tests.support.tiny_engine import tiny_engine


@pytest.fixture(scope="module")
def checkpoint(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(name, tmp_path_factory.mktemp(name))


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, **FIELDS) as llm:
        yield llm


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with tiny_engine("llama_gqa", tmp_path_factory.mktemp("llama")) as llm:
        yield llm
