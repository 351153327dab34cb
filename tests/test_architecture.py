"""What docs/architecture.md says of the code's size and shape is so."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import itertools
import pkgutil
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import jaxllm
from jaxllm.engine import features
from jaxllm.engine.core.feature import Feature
from jaxllm.engine.core.request import Request
from jaxllm.engine.messages import EngineRequest
from jaxllm.requests.sampling import SamplingParams

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


def test_the_package_is_small_and_so_are_its_functions() -> None:
    files = [*PACKAGE.rglob("*.py")]
    assert 300 < len(files) <= 450
    assert 50_000 < lines("**/*.py") <= 87_000
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, functions) and (node.end_lineno or 0) - node.lineno >= 80
    ]
    assert not long


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


def test_features_are_asked_by_fields_that_requests_have() -> None:
    """A name that no request has would keep its feature from ever being asked."""
    for module in pkgutil.walk_packages(features.__path__, f"{features.__name__}."):
        importlib.import_module(module.name)
    found = [feature for feature in Feature.__subclasses__() if feature.__module__.startswith(features.__name__)]
    known = {*dir(EngineRequest), *dir(SamplingParams), *SamplingParams.__dataclass_fields__}
    assert len(found) > 10
    assert {name for feature in found for name in feature.asked_by} <= known


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
