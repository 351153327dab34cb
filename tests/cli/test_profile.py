"""`jaxllm profile`, as it is typed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.reference.tiny import write_checkpoint

pytestmark = pytest.mark.programs


def test_a_trace_of_the_steps_is_written(cli, tmp_path: Path) -> None:
    model = write_checkpoint("llama_gqa", tmp_path / "model")
    sizes = ("--max-model-len", "64", "--max-num-seqs", "2", "--kv-cache-memory", "16MiB")
    code, out, err = cli(
        "profile", str(model), "--output", str(tmp_path / "traces"), "--num-steps", "4", "--input-len", "8",
        "--skip-tokenizer-init", "--dtype", "float32", "--compile-cache-dir", str(tmp_path / "cache"), *sizes,
    )  # fmt: skip
    assert code == 0, err
    (trace,) = map(Path, out.splitlines())
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("jit_step") or "jit(step)" in str(event)]
    assert steps


def test_an_output_that_is_no_folder_is_refused(cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, err = cli("profile", "smollm2-135m", "--output", str(tmp_path / "file"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--output is" in err
