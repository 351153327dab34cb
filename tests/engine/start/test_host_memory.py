"""A plan that the host's memory cannot hold is refused, or warned of, in words."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from jaxllm import EngineConfig
from jaxllm.engine.start.blueprint import plan_engine
from jaxllm.engine.start.offload import check_host_memory
from jaxllm.engine.start.plan import PROCESS_BYTES
from jaxllm.engine.start.platform import Platform
from jaxllm.errors import ConfigError
from tests.reference.tiny import write_checkpoint

GIB = 2**30


def test_what_never_fits_is_refused_and_what_is_tight_is_said(
    tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    directory = write_checkpoint("llama_gqa", tmp_path_factory.mktemp("tiny"))
    roomy = Platform("cpu", 1, None, 8 * GIB, host_memory=16 * GIB)
    plan = plan_engine(EngineConfig(model=str(directory), kv_cache_memory="1GiB", max_num_seqs=256), roomy)
    needed = PROCESS_BYTES + plan.planned_bytes
    with caplog.at_level(logging.WARNING):
        check_host_memory(plan, roomy)
        check_host_memory(plan, replace(roomy, host_memory=None, free_host_memory=0))
        check_host_memory(plan, replace(roomy, memory_limit=GIB, host_memory=1))  # an accelerator has its own
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        check_host_memory(plan, replace(roomy, free_host_memory=needed - 1))
    assert "will be needed: 600 MiB for the program itself" in caplog.text
    with pytest.raises(ConfigError, match=r"needs .* of memory \(600 MiB for the program itself, .* may have .*isq"):
        check_host_memory(plan, replace(roomy, host_memory=needed - 1))
