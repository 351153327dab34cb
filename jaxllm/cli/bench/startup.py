"""`jaxllm bench startup`: from starting the process to its first token, and to its full speed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from jaxllm.cli.bench.flags import Count, JsonFile
from jaxllm.cli.bench.full_speed import time_to_full_speed
from jaxllm.cli.bench.report import report
from jaxllm.cli.bench.stats import spread
from jaxllm.cli.settings import takes_settings
from jaxllm.config import EngineConfig

_PROMPT = "The capital of France is"


@takes_settings(EngineConfig)
def startup(config: EngineConfig, *, num_iters: Count = 3, json: JsonFile = None) -> None:
    """Seconds from process start to first token and to full speed, with an empty compile cache and then a full one.

    Each start is a process of its own: `jaxllm generate` for the first token, and one stream that goes on until nothing
    is left to compile for full speed, from when on it is within 5 % of what it stays at. The model has been downloaded
    before and its file is likely in the system's page cache.

    Args:
        num_iters: Starts with a full compile cache.
        json: Write the result to this file.
    """
    from jaxllm.weights.source import resolve_model

    resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    with tempfile.TemporaryDirectory(prefix="jaxllm-compile-", ignore_cleanup_errors=True) as cache:
        measured = config.model_copy(update={"compile_cache_dir": Path(cache)})
        cold = {"cold_first_token_s": time_to_first_token(measured)}
        shutil.rmtree(cache)
        cold["cold_full_speed_s"] = time_to_full_speed(measured)  # and now everything is compiled
        first = [time_to_first_token(measured) for _ in range(num_iters)]
        full = [time_to_full_speed(measured) for _ in range(num_iters)]
    warm = {"warm_first_token_s": spread(first), "warm_full_speed_s": spread(full)}
    report("startup", config, {"num_iters": num_iters}, [cold | warm], json)


def time_to_first_token(config: EngineConfig) -> float:
    """Seconds until a fresh process with `config` puts its first byte of text on stdout.

    Raises:
        ConfigError: the process failed; with its message.
    """
    from jaxllm.cli.bench.process import child, failure

    begin = time.perf_counter()
    with child(["generate", _PROMPT, "--raw", "--temperature", "0", "--max-tokens", "8"], config, subprocess.PIPE) as (
        process,
        log,
    ):
        assert process.stdout is not None
        first = process.stdout.read(1)
        seconds = time.perf_counter() - begin
        process.stdout.read()
        if not first or process.wait() != 0:
            raise failure(process, log)
    return seconds
