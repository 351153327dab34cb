"""The benchmark that waits for a GPU runs here, at sizes that a CPU does in seconds, with nothing it can do without."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
import pytest

from benchmarks import gpu
from benchmarks.gpu_bars import BARS, verdicts
from benchmarks.gpu_end_to_end import nano_vllm_load
from benchmarks.gpu_slice import QUANTIZED

ROOT = Path(__file__).parents[1]


def run(out: Path, *slices: str, **environment: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--tiny", "--out", out, "--slice", *slices]
    return subprocess.run(program, capture_output=True, text=True, env=os.environ | environment)


def test_steps_are_measured_and_kept_with_stand_ins_for_what_is_missing(tmp_path: Path) -> None:
    """All but the end-to-end slices, which compile for a minute; those ran once with nothing else installed."""
    alone = {"PYTHONPATH": str(gpu.STANDINS)}  # before the packages that they stand for
    done = run(tmp_path, "attention", "decode", "prefill", **alone)
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads((tmp_path / "gpu.json").read_text())
    assert summary["device"] and set(summary["slices"]) == {"attention", "decode", "prefill"}
    rows = [row for kept in summary["slices"].values() for row in kept["rows"]]
    assert {row["what"] for row in rows} == {"copy", "matmul", "attention", "decode", "prefill", "mixed"}
    for row in rows:
        assert row.get("share", 1) > 0
        if row["what"] == "decode":
            assert abs(row["toks"] * row["ms"] / 1e3 - row["rows"]) < 1e-6
            assert any(Path(row["profile"]).rglob("*.xplane.pb"))
    judged = {bar["bar"]: bar["verdict"] for bar in summary["bars"]}
    assert judged["16 streams, times one"] in ("miss", "pass")  # by this machine's load
    assert judged["256 streams, tok/s"] == "not measured"
    assert "16 streams, times one" in done.stdout

    kept = json.loads((tmp_path / "decode.json").read_text())
    dropped = kept["rows"].pop()
    (tmp_path / "decode.json").write_text(json.dumps(kept))
    run(tmp_path, "decode", **alone)
    again = json.loads((tmp_path / "decode.json").read_text())["rows"]
    cells = [row for row in again if row["what"] == "decode"]
    assert len(cells) == 2 and cells[0] in kept["rows"] and cells[1]["rows"] == dropped["rows"] and cells[1] != dropped


def test_the_prompts_are_nano_vllms() -> None:
    """Its README gives the tokens that its bench.py generates: 133,966."""
    prompts, lengths = nano_vllm_load()
    assert (len(prompts), sum(map(len, prompts)), sum(lengths)) == (256, 142_827, 133_966)


def rows_of(one: float, **changes: float) -> list[dict[str, Any]]:
    toks = {1: one, 16: 16 * one * 0.8, 64: 2500.0, 256: 11_500.0} | {int(k[1:]): v for k, v in changes.items()}
    decode = [
        {"what": "decode", "variant": "greedy", "rows": rows, "context": context, "toks": t / (context / 1024),
         "share": 0.9, "host_ms": 0.3, "profile": f"profiles/{rows}"}
        for context in (1024, 8192) for rows, t in toks.items()
    ]  # fmt: skip
    sampled = [{**decode[0], "variant": "sampled", "toks": 1.0, "host_ms": 0.5}]
    packed = [{**decode[0], "isq": kind, "toks": 2.3 * one} for kind in QUANTIZED]
    attention = [
        {"what": "attention", "rows": rows, "context": 1024, "share": 0.1 if rows == 1 else 0.9} for rows in (1, 8)
    ]
    prefill = [{"what": "prefill", "tokens": n, "TFLOPs": 100.0 if n == 512 else 450.0} for n in (512, 2048)]
    return decode + sampled + packed + attention + prefill


def test_each_bar_is_judged_by_the_cell_that_it_is_about() -> None:
    judged = verdicts(rows_of(160), "NVIDIA H100 80GB HBM3")
    assert len(judged) == len(BARS) + 1 and {bar["verdict"] for bar in judged} == {"pass"}, judged
    missed = [bar for bar in verdicts(rows_of(160), "NVIDIA H200") if bar["verdict"] == "miss"]
    assert [(bar["measured"], bar["where"], bar["profile"]) for bar in missed] == [
        (160, "decode greedy rows 1 context 1024", "profiles/1")
    ]
    slow = {
        bar["bar"] for bar in verdicts(rows_of(160, r256=10_999, r16=12 * 160 - 1), "H100") if bar["verdict"] == "miss"
    }
    assert slow == {"16 streams, times one", "256 streams, tok/s"}
    assert {bar["verdict"] for bar in verdicts([], "H100")} == {"not measured"}


@pytest.fixture(params=["installed", "stand-in"])
def package(request: pytest.FixtureRequest):
    """Loads a package, or what stands for it: both do what the engine asks of them."""

    def load(name: str) -> ModuleType:
        if request.param == "installed":
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(f"standin_{name}", gpu.STANDINS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_rearrange(package) -> None:
    x, rearrange = np.arange(24).reshape(4, 6), package("einops").rearrange
    assert (rearrange(x, "t (k g) -> k (g t)", k=2) == x.reshape(4, 2, 3).transpose(1, 2, 0).reshape(2, 12)).all()
    assert (rearrange(x, "(h r) ... -> h r ...", r=2) == x.reshape(2, 2, 6)).all()


def test_structs(package) -> None:
    msgspec = package("msgspec")

    class Delta(msgspec.Struct, kw_only=True):
        name: str
        ids: list[int] = []  # noqa: RUF012
        at: float = msgspec.field(default_factory=lambda: 2.0)

    first, second = Delta(name="a"), Delta(name="b")
    first.ids.append(1)
    assert (second.ids, second.at, msgspec.structs.replace(first, name="c").ids) == ([], 2.0, [1])

    @dataclass
    class Known:
        top_k: int = 7
        top_p: float = 1.0

    assert msgspec.convert({"top_k": 5, "other": "x"}, Known, strict=False) == Known(5, 1.0)


def test_settings(package) -> None:
    pydantic = package("pydantic")

    class Base(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
        size: Annotated[int, pydantic.Field(ge=1)] = 1
        name: str | None = None

    class More(Base):
        port: int = 8

    made = More(size=4)
    assert (made.size, made.name, made.port, made.model_fields_set) == (4, None, 8, {"size"})
    assert list(More.model_fields) == ["size", "name", "port"] and made.model_dump(exclude_unset=True) == {"size": 4}
    with pytest.raises(pydantic.ValidationError) as refused:
        More(sise=4)
    assert refused.value.errors()[0]["loc"] == ("sise",) and refused.value.errors()[0]["type"] == "extra_forbidden"


def test_annotations(package) -> None:
    typed = package("jaxtyping")
    assert typed.Float[np.ndarray, "T D"] | None
