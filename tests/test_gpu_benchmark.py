"""The benchmark that waits for a GPU runs here, at sizes that a CPU does in seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_part_is_measured_and_written(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    parts = ("attention", "decode", "prefill", "mixed")
    program = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--tiny", "--out", out, "--parts", *parts]
    done = subprocess.run(program, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-2000:]
    written = json.loads(out.read_text())
    assert written["device"]
    assert {row["what"] for row in written["results"]} == {"copy", "matmul", "plan", *parts}
    for row in written["results"]:
        assert row.get("share", 1) > 0
        if row["what"] == "decode":
            assert abs(row["toks"] * row["ms"] / 1e3 - row["rows"]) < 1e-6
