"""Every Pallas kernel, compiled for the GPUs that people have: it fits, and nothing of it spills out of registers.

`make check-gpu` compiles a case of each kernel for an H100; all cases for all GPUs, which `make check-gpu
ARGS='-m hardware'` compiles, take a quarter of an hour.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.gpu.targets import TARGETS

OPTIMIZED = True

pytestmark = [pytest.mark.hardware, pytest.mark.timeout(900)]

ATTENTION = {"rotate_and_store", "paged_attention_decode", "paged_attention_combine", "paged_attention_prefill"}
LATENT = ATTENTION - {"rotate_and_store"}

ONE_OF_EACH = (
    "Llama-3.1-8B plain pages",
    "Llama-3.1-8B int8 pages",
    "DeepSeek-V3 plain pages",
    "experts 4 bits",
    "few rows, 4 bits",
    "few rows, fp8 in blocks",
    "integers",
    "in tiles, Q4_K",
    "in tiles, Q5_1 of 1408 inputs",
    "latents, plain",
    "delta rule of 128",
    "norm of 4096",
    "states of Granite 4",
    "routing as Qwen3-30B-A3B",
)


def compiled(architecture: str, *cases: str) -> dict[str, Any]:
    """By case: what each of its kernels takes, or why the compiler would not have it."""
    program = [sys.executable, "-m", "tests.gpu.kernels", architecture, *cases]
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


def complaints(architecture: str, found: dict[str, Any]) -> list[str]:
    """Kernels that do not compile, and those that spill."""
    wrong = []
    for case, kernels in found.items():
        if isinstance(kernels, str):
            wrong.append(f"{case}: {kernels}")
        else:
            wrong += [f"{case}: {name} spills {spilled} bytes" for name, (_, spilled) in kernels.items() if spilled]
    return wrong


@pytest.mark.parametrize(
    ("architecture", "cases"),
    [("sm_90a", ONE_OF_EACH), *(pytest.param(name, (), marks=pytest.mark.slow) for name in TARGETS)],
    ids=["sm_90a, one of each", *TARGETS],
)
def test_no_kernel_spills(architecture: str, cases: tuple[str, ...]) -> None:
    found = compiled(architecture, *cases)
    assert complaints(architecture, found) == []
    for case, kernels in found.items():
        names = {name.partition("__")[0] for name in kernels}
        if "pages" in case:
            assert names >= (LATENT if "DeepSeek" in case else ATTENTION)
        elif "few rows" in case:
            assert names & {"few_rows", "block_scaled_few_rows"}
        elif case == "integers":
            assert names >= {"round_runs", "matmul_of_integers"}
        elif "in tiles" in case:
            assert "packed_matmul" in names
        elif "latents" in case:
            assert names >= {"absorb_and_store", "expand_heads"}
        elif "delta rule" in case:
            assert "delta_rule_step" in names
        elif "experts" in case:
            assert "matmul_of_tiles" in names
        elif "states" in case:
            assert "ssd_decode" in names
        elif "routing" in case:
            assert names == {"route", "choose_experts", "list_rows", "row_tiles"}


def test_a_kernel_that_spills_is_seen() -> None:
    """Else the test above would show nothing. Codes are expanded to more floats than an A100 has registers for."""
    wrong = complaints("sm_80", compiled("sm_80", "float32 int8 pages"))
    assert any("paged_attention_decode spills" in line for line in wrong)
    assert any("paged_attention_prefill spills" in line for line in wrong)
