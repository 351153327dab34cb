"""The real models, fetched once into the user's cache."""

import functools
from pathlib import Path

import pytest

from jaxllm.errors import ModelNotFoundError
from jaxllm.weights.source import resolve_model


@functools.cache
def real_model(name: str) -> Path:
    try:
        return resolve_model(name)
    except ModelNotFoundError as error:
        pytest.skip(str(error))
