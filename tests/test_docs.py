"""The documentation says what the code says. `python -m tests.test_docs` writes its tables anew."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args, get_origin

import pytest
import yaml
from pydantic.fields import FieldInfo

from jaxllm.chat.conversation import EFFORT_BUDGETS
from jaxllm.chat.formats import TOOL_FORMATS
from jaxllm.cli.settings import sections
from jaxllm.config import EngineConfig, ServeConfig
from jaxllm.config.others import SERVERS, read_table, rows
from jaxllm.config.values import Isq
from jaxllm.engine.start.blueprint import plan_engine
from jaxllm.engine.start.plan import EnginePlan
from jaxllm.engine.start.platform import Platform
from jaxllm.models.registry import FAMILIES
from jaxllm.text.reasoning import REASONING_FORMATS
from tests.serving.api_tables import fields_tables, routes_table

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *PAGES,
    *sorted((ROOT / "benchmarks/results").glob("*.md")),
]
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
OWN = re.compile(r"\]\(https://github\.com/jaxllm/jaxllm/(?:blob|tree)/main/([^)#]+)")
"""How pages of the site name files that are not among them."""


def settings_tables() -> str:
    fields = ServeConfig.model_fields
    parts = {title: {name: fields[name] for name in names} for title, names in sections(ServeConfig).items()}
    return "\n".join(f"## {title}\n\n{table(part)}" for title, part in parts.items())


def table(fields: dict[str, FieldInfo]) -> str:
    rows = [(f"`{name}`", f"`{default(field)}`", meaning(field)) for name, field in fields.items()]
    head = [("Setting", "Default", "Meaning"), ("---", "---", "---")]
    return "".join(f"| {' | '.join(row)} |\n" for row in [*head, *rows])


def default(field: FieldInfo) -> str:
    if isinstance(field.default, Path):
        return str(field.default).replace(str(Path.home()), "~")
    if field.default is None or isinstance(field.default, bool):
        return "null" if field.default is None else str(field.default).lower()
    return str(field.default)


def meaning(field: FieldInfo) -> str:
    accepted = choices(field.annotation)
    text = " ".join((field.description or "").split())
    return text + (f" One of {', '.join(f'`{choice}`' for choice in accepted)}." if accepted else "")


def family_table() -> str:
    rows = [(f.name, f.models, code(f.architectures), code(f.gguf_architectures) or "–") for f in FAMILIES]
    return markdown(("Family", "Models", "Hugging Face class", "GGUF architecture"), rows)


def tool_formats_table() -> str:
    rows = [("Name", "A call")]
    for tool_format in TOOL_FORMATS:
        around = tool_format.written
        text = around.start + tool_format.head("NAME") + "…" + around.end + around.stop
        rows.append((f"`{tool_format.name}`", verbatim(text)))
    return "".join(f"| {' | '.join(row)} |\n" for row in [rows[0], ("---", "---"), *rows[1:]])


def reasoning_formats_table() -> str:
    rows = [("Name", "Marks", "")]
    for form in REASONING_FORMATS:
        notes = {"without the opening mark too": form.always_open, "stays in the content": form.in_content}
        note = "; ".join(text for text, holds in notes.items() if holds)
        rows.append((f"`{form.name}`", f"{verbatim(form.open)} … {verbatim(form.close)}", note))
    return "".join(f"| {' | '.join(row)} |\n" for row in [rows[0], ("---",) * 3, *rows[1:]])


def efforts_table() -> str:
    rows = [("Effort", "Tokens of reasoning"), ("---", "---")]
    rows += [(f"`{effort}`", "any number" if most is None else str(most)) for effort, most in EFFORT_BUDGETS.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def renamed_table(server: str) -> str:
    """One row a flag of ours, with all of theirs that it stands for."""
    found: dict[str, list[str]] = {}
    for row in rows():
        others = [name for name in row.names if name != row.ours]
        if (row.server, row.fate) == (server, "renamed") and others:
            ours = HERE.get(row.ours, row.ours) + (f" {row.meaning['value']}" if "value" in row.meaning else "")
            found.setdefault(f"`{ours.lstrip('$')}`", []).extend(others)
    return markdown((server, "Here"), ((code(tuple(names)), ours) for ours, names in found.items()))


HERE = {
    "@repo": "MODEL", "@file": "MODEL:FILE", "--model": "MODEL", "@address": "--coordinator-address",
    "@port": "--coordinator-address",
}  # fmt: skip


def reasons_table(server: str, kind: str) -> str:
    """One row a reason, with all flags that have it, and the values that they may have."""
    by_reason: dict[str, list[str]] = {}
    for row in rows():
        if (row.server, row.fate) == (server, kind):
            values = f" {'|'.join(row.only)}" if row.only else ""
            by_reason.setdefault(row.why, []).extend(name + values.replace("|", "\\|") for name in row.names)
    return markdown((server, "Why"), ((code(tuple(names)), why) for why, names in by_reason.items()))


def variables_table() -> str:
    meanings = read_table()["renamed"]["variables"].items()
    found = [(f"`{name}`", f"`{ours if isinstance(ours, str) else ours['is']}`") for name, ours in meanings]
    patterns = ((by_server.get("variables", ""), why) for why, by_server in read_table()["ignored"].items())
    found += [(code(tuple(names.split())), why) for names, why in patterns if names not in ("", "*")]
    return markdown(("Variable", "Here"), found)


def verbatim(text: str) -> str:
    """'{"a":\\n"b|c"}' in a table's cell."""
    return "`" + text.replace("\n", "\\n").replace("|", "\\|") + "`"


def code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def choices(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if "Literal" in str(get_origin(annotation)) else ()


HUB_MODELS = {
    "google/gemma-3-1b-it": ("gemma-3-1b-it", "yes"),
    "meta-llama/Llama-3.2-1B-Instruct": ("Llama-3.2-1B", "yes"),
    "HuggingFaceTB/SmolLM3-3B": ("SmolLM3-3B", "no"),
    "microsoft/Phi-4-mini-instruct": ("Phi-4-mini-instruct", "no"),
    "Qwen/Qwen3-8B": ("Qwen3-8B", "no"),
}
"""Name on the hub -> its config in tests/reference/configs, and whether its terms must be accepted there."""


def hub_models_table() -> str:
    """What the plan says of each: as it is, in four bits, and for each context of 8,192 tokens."""
    head = ("Model", "Weights", "with `--isq q4k`", "KV cache of 8,192 tokens", "Gated")
    rows = [head, ("---", "---:", "---:", "---:", "---")]
    for name, (config, gated) in HUB_MODELS.items():
        plain, packed = (_plan_of(config, isq) for isq in (None, "q4k"))
        kv = plain.kv_bytes_per_token * 8192
        sizes = (plain.weight_bytes, packed.weight_bytes, kv)
        rows.append((f"`{name}`", *(f"{size / 1e9:.1f} GB" for size in sizes), gated))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


SIZED = (
    "Llama-3.2-1B", "SmolLM3-3B", "Phi-4-mini-instruct", "Llama-3.1-8B", "Qwen3-8B", "gemma-3-12b-it",
    "Mistral-Small-3.2-24B-Instruct-2506", "Qwen3-30B-A3B", "Qwen3-32B", "Llama-3.1-70B", "DeepSeek-V3",
)  # fmt: skip
"""Configs in tests/reference/configs whose sizes docs/memory.md shows."""


def sizes_table() -> str:
    """What the plan says of weights in three kinds, and of the KV cache in two."""
    rows = [("Model", "Parameters", "bfloat16", "`q8_0`", "`q4k`", "KV", "KV int8"), ("---", *["---:"] * 6)]
    for config in SIZED:
        kinds = [_plan_of(config, isq) for isq in (None, "q8_0", "q4k")]
        small = _plan_of(config, None, kv_cache_dtype="int8")
        weights = (f"{plan.weight_bytes / 1e9:,.1f}" for plan in kinds)
        kv = (f"{plan.kv_bytes_per_token / 1e3:.0f}" for plan in (kinds[0], small))
        rows.append((config, f"{kinds[0].num_parameters / 1e9:.1f} B", *weights, *kv))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _plan_of(config: str, isq: Isq | None, **settings: Any) -> EnginePlan:
    with TemporaryDirectory() as folder:
        published = json.loads((ROOT / "tests" / "reference" / "configs" / f"{config}.json").read_text())
        Path(folder, "config.json").write_text(json.dumps(published["config"]))
        settings |= {"load_format": "dummy", "skip_tokenizer_init": True, "cpu_kernels": "off"}
        asked = EngineConfig(model=folder, isq=isq, max_model_len=8192, **settings)
        return plan_engine(asked, Platform("cpu", 1, None, 4 * 2**40))


def olmo2_diff() -> str:
    """What the package has for OLMo 2, the first of its file."""
    name = "jaxllm/models/families/norms.py"
    section = re.search(r"# OLMo 2.*?(?=\n\n\n# )", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL)
    assert section is not None
    return "\n".join(["```diff", f"+++ {name}", *(f"+{line}" for line in section.group().splitlines()), "```\n"])


def dashboard_table() -> str:
    panels = json.loads((ROOT / "deploy/grafana/dashboards/jaxllm.json").read_text(encoding="utf-8"))["panels"]
    rows = [(panel["title"], panel["description"]) for panel in panels if panel["type"] != "row"]
    return markdown(("Panel", "What it shows"), rows)


def alerts_table() -> str:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    rows = [(f"`{rule['alert']}`", rule["annotations"]["description"]) for rule in rules]
    return markdown(("Alert", "When, and what to do"), rows)


def markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ("---",) * len(head), *rows])


OTHERS = ROOT / "docs/coming-from.md"
GENERATED: dict[str, tuple[Path, Callable[[], str]]] = {
    "routes": (ROOT / "docs/api.md", routes_table),
    "fields": (ROOT / "docs/api.md", fields_tables),
    "settings": (ROOT / "docs/configuration.md", settings_tables),
    "tool formats": (ROOT / "docs/tools.md", tool_formats_table),
    "efforts": (ROOT / "docs/tools.md", efforts_table),
    "reasoning formats": (ROOT / "docs/tools.md", reasoning_formats_table),
    **{f"{server}'s flags by other names": (OTHERS, partial(renamed_table, server)) for server in SERVERS},
    **{f"{server}'s flags without effect": (OTHERS, partial(reasons_table, server, "ignored")) for server in SERVERS},
    **{
        f"{server}'s refused flags": (OTHERS, partial(reasons_table, server, "refused"))
        for server in SERVERS
        if any((row.server, row.fate) == (server, "refused") for row in rows())
    },
    "variables of other servers": (OTHERS, variables_table),
    "models of the hub": (ROOT / "docs/index.md", hub_models_table),
    "sizes": (ROOT / "docs/memory.md", sizes_table),
    "dashboard": (ROOT / "docs/operations.md", dashboard_table),
    "alerts": (ROOT / "docs/operations.md", alerts_table),
    "families": (ROOT / "docs/models.md", family_table),
    "OLMo 2": (ROOT / "CONTRIBUTING.md", olmo2_diff),
}
"""Marker of a generated part -> the page it is in, and what makes it."""


def part(marker: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- {marker} -->\n).*(?=<!-- end of {marker} -->)", re.DOTALL)


@pytest.mark.parametrize("marker", GENERATED)
def test_tables_are_those_of_the_code(marker: str):
    page, make = GENERATED[marker]
    found = part(marker).search(page.read_text(encoding="utf-8"))
    assert found and found.group() == f"\n{make()}\n", "out of date; run: python -m tests.test_docs"


def test_a_family_takes_few_lines():
    assert len(olmo2_diff().splitlines()) < 30


def test_flags_that_stand_beside_those_of_others_are_ours():
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8").partition("## Coming from llama.cpp")[2]
    cells = [re.split(r"(?<!\\)\|", line)[2] for line in text.splitlines() if line.startswith("| ")]
    ours = {flag for cell in cells for flag in re.findall(r"--([a-z][a-z-]+)", cell)} - {"help"}
    assert len(ours) > 20
    assert not {flag.removeprefix("no-").replace("-", "_") for flag in ours} - ServeConfig.model_fields.keys()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    text = document.read_text(encoding="utf-8")
    assert not [link for link in LINK.findall(text) if not (document.parent / link).exists()]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_our_own_repository_lead_somewhere(document: Path):
    """And no page of the site has a relative link to a file that is not on the site."""
    text = document.read_text(encoding="utf-8")
    assert not [link for link in OWN.findall(text) if not (ROOT / link).exists()]
    assert document not in PAGES or not [link for link in LINK.findall(text) if ".." in link]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path):
    """`engine/core.py` is jaxllm/engine/core.py, `configs/smollm2.yaml` is that. A folder of bytecode alone is none."""
    named = re.findall(r"`((?:[\w-]+/)+(?:[\w.-]+\.(?:py|yaml|md|ipynb))?)`", document.read_text(encoding="utf-8"))
    places = {name: [base / name for base in (ROOT, ROOT / "jaxllm")] for name in named}
    assert not [name for name, at in places.items() if not any(p.is_file() or any(p.glob("*.*")) for p in at)]


def written(page: Path) -> int:
    """How many words of it are written by hand: all but those that `GENERATED` makes."""
    text = page.read_text(encoding="utf-8")
    for marker, (place, _) in GENERATED.items():
        text = part(marker).sub("", text) if place == page else text
    return len(text.split())


def test_the_picture_of_speed_shows_what_was_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    chart = importlib.import_module("bar_chart")
    assert chart.PICTURE.read_text(encoding="utf-8") == chart.speed(), "run: python benchmarks/bar_chart.py"


def test_the_documentation_stays_small():
    assert len(PAGES) <= 26
    assert sum(map(written, PAGES)) <= 40_000
    assert (ROOT / "README.md").stat().st_size <= 6 * 1024


@pytest.mark.parametrize("name", ["models", "pallas_kernels", "sharding", "serving"])
def test_the_map_at_the_root_leads_into_the_package(name: str):
    link = ROOT / name
    assert link.is_symlink() and link.readlink() == Path("jaxllm") / name and link.is_dir()


if __name__ == "__main__":
    for marker, (page, make) in GENERATED.items():
        text = page.read_text(encoding="utf-8")
        page.write_text(part(marker).sub(lambda _, make=make: f"\n{make()}\n", text), encoding="utf-8")
