"""What docs/architecture.md says of the code's size and shape is so."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest
from fastapi.testclient import TestClient

import jaxllm
from jaxllm import AsyncLLM
from jaxllm.config import ServeConfig
from jaxllm.engine.core.request import Request
from jaxllm.serving.app import create_app
from jaxllm.serving.registry import single_model
from tests.serving.mixed_requests import write_model
from tests.sizes import FIELDS

PACKAGE = Path(jaxllm.__file__).parent
ROOT = PACKAGE.parent
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
CORE = (
    "engine/**/*.py", "models/config.py", "models/decoder.py", "models/layers/*.py", "quantization/weight.py",
    "pallas_kernels/kernels.py", "pallas_kernels/metadata.py", "pallas_kernels/pages.py", "pallas_kernels/reference.py",
    "requests/sampling.py", "requests/outputs.py", "config/*.py",
)  # fmt: skip
"""What "Reading the code in an afternoon" begins with."""


def lines(*patterns: str) -> int:
    paths = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def said(pattern: str, text: str = ARCHITECTURE) -> int:
    """The number in it, which spaces and line ends may stand around."""
    [number] = re.findall(pattern.replace(" ", r"\s+").replace("#", r"([\d,]+)"), text)
    return int(number.replace(",", ""))


def check(number: int, counted: int) -> None:
    assert abs(number - counted) <= 0.05 * counted, f"it says about {number:,}; counted are {counted:,}"


def test_the_code_is_about_as_long_as_it_says() -> None:
    check(said("and back is about # lines"), lines(*CORE))
    check(said("`engine/` has about # "), lines("engine/**/*.py"))
    check(said("The server around it has about # "), lines("serving/**/*.py"))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is of Python 3.12")
def test_a_chat_request_passes_about_as_many_files_as_it_says(tmp_path: Path) -> None:
    files: set[str] = set()

    def begins(code: CodeType, offset: int) -> object:
        if Path(code.co_filename).is_relative_to(PACKAGE) and code.co_name != "<module>":
            files.add(code.co_filename)
        return sys.monitoring.DISABLE

    settings = FIELDS | {"model": str(write_model(tmp_path)), "skip_tokenizer_init": False}
    engine = AsyncLLM(**settings)
    config = ServeConfig(data_dir=tmp_path / "data", **settings)
    app = create_app(config.of_server, single_model(config, engine))
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": True}
    events, tool = sys.monitoring.events, sys.monitoring.PROFILER_ID
    with TestClient(app, base_url="http://localhost") as client:
        client.post("/v1/chat/completions", json=body).raise_for_status()  # its steps are compiled for it
        sys.monitoring.use_tool_id(tool, "files")
        try:
            sys.monitoring.register_callback(tool, events.PY_START, begins)
            sys.monitoring.set_events(tool, events.PY_START)
            client.post("/v1/chat/completions", json=body).raise_for_status()
        finally:
            sys.monitoring.set_events(tool, 0)
            sys.monitoring.free_tool_id(tool)
            engine.shutdown()
    check(said("runs code of about # files"), len(files))


def test_the_tree_of_the_house_is_the_packages_and_stands_once() -> None:
    tree = re.search(r"```\njaxllm/\n(.*?)\n\S", ARCHITECTURE, re.DOTALL)
    assert tree
    listed = {name.rstrip("/") for name in re.findall(r"^  ([\w./]+)", tree[1], re.MULTILINE)}
    found = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert listed == found - {"__main__.py"}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert [page.name for page in pages if "\njaxllm/\n" in page.read_text(encoding="utf-8")] == ["architecture.md"]


def test_the_core_is_small_and_names_no_feature() -> None:
    """Neither in a name nor in a text; what docstrings and comments tell is the reader's."""
    assert lines("engine/core/*.py") <= 6_000
    features = {
        name
        for path in (PACKAGE / "engine/features").rglob("*.py")
        for name in re.findall(r'^    name = "(\w+)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(features) > 10
    words = {*features, *(name.removesuffix("s") for name in features), "draft", "lora", "thinking", "tiers"}
    words -= {"state", "score"}
    named = {
        f"{path.name}: {token}"
        for path in (PACKAGE / "engine/core").glob("*.py")
        for token in code_tokens(path)
        if not words.isdisjoint(re.findall("[a-z]+", token.lower()))
    }
    assert not named


def test_a_request_of_the_core_has_few_attributes() -> None:
    assert 10 < len(dataclasses.fields(Request)) <= 25


def code_tokens(path: Path) -> Iterator[str]:
    """Names, and texts that are more than a statement of their own."""
    with path.open("rb") as file:
        tokens = [
            token for token in tokenize.tokenize(file.readline) if token.type not in (tokenize.NL, tokenize.COMMENT)
        ]
    begins = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    for before, token in itertools.pairwise(tokens):
        if token.type == tokenize.NAME or (token.type == tokenize.STRING and before.type not in begins):
            yield token.string
