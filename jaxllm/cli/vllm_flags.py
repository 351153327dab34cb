"""Flags of vLLM's server that are other words for ours, that ask for what is always so, or that cannot be honoured."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

from jaxllm.errors import ConfigError

logger = logging.getLogger(__name__)

RENAMED: Mapping[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-ep": "--enable-expert-parallel",
    "--nnodes": "--num-processes",
    "--node-rank": "--process-id",
    "--enable-log-requests": "--enable-request-logging",
    "--kv-cache-memory-bytes": "--kv-cache-memory",
}
"""By the name here. Most flags have vLLM's name, and are not listed."""

ALWAYS_SO: Mapping[str, str] = {
    "--enable-auto-tool-choice": "the model always chooses where the request lets it; see --tool-call-parser",
    "--headless": "of several processes only the first answers requests; see --process-id",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--async-scheduling": "the next step is always dispatched before the last one is read",
    "--disable-log-requests": "requests are logged with --enable-request-logging or --log-format json only",
    "--no-enable-log-requests": "requests are logged with --enable-request-logging or --log-format json only",
    "--disable-log-stats": "statistics are never logged; /metrics has them",
    "--disable-uvicorn-access-log": "requests are logged with --enable-request-logging or --log-format json only",
    "--enable-prompt-tokens-details": "usage always has cached_tokens",
    "--enable-request-id-headers": "responses always have X-Request-Id",
    "--enable-server-load-tracking": "/load always counts",
    "--enable-sleep-mode": "/sleep always puts a model to sleep",
}
"""Switches, and what is so without them."""

_CODE = "it would run code that came with a model or from a file"
_STARTED = "mpirun, Slurm or Kubernetes start the processes: see docs/scale.md and --coordinator-address"
_EXECUTOR = "see --multi-process for a process for each GPU of a machine, docs/scale.md for several machines, and --ray"
_NO_MEDIA = "models are served for text only"
_READ = "it is read from the checkpoint"
_COMPILED = "steps are compiled by XLA; see --enforce-eager, --decode-buckets and --prefill-buckets"
_OFFLOAD = "see --kv-offload-memory, bytes for pages that have lost their place, and --kv-offload-dir"
_ONE_GRAMMAR = "grammars are always llguidance's"

REFUSED: Mapping[str, str] = {
    "--trust-remote-code": _CODE,
    "--tool-parser-plugin": _CODE,
    "--reasoning-parser-plugin": _CODE,
    "--logits-processors": _CODE,
    "--middleware": _CODE,
    "--worker-cls": _CODE,
    "--worker-extension-cls": _CODE,
    "--swap-space": _OFFLOAD,
    "--kv-offloading-size": _OFFLOAD,
    "--kv-offloading-backend": _OFFLOAD,
    "--cpu-offload-gb": "weights stay on the devices; see --isq for smaller ones",
    "--num-gpu-blocks-override": "see --kv-cache-memory",
    "--max-seq-len-to-capture": _COMPILED,
    "--cuda-graph-sizes": _COMPILED,
    "--compilation-config": _COMPILED,
    "-O": _COMPILED,
    "--distributed-executor-backend": _EXECUTOR,
    "--master-addr": _STARTED,
    "--master-port": _STARTED,
    "--api-server-count": "one process answers all requests",
    "--disable-frontend-multiprocessing": "see --no-engine-process",
    "--device": "JAX chooses it; the environment variable JAX_PLATFORMS names another",
    "--task": _READ,
    "--runner": _READ,
    "--convert": _READ,
    "--model-impl": _READ,
    "--tokenizer-mode": _READ,
    "--config-format": _READ,
    "--hf-config-path": "see --hf-overrides",
    "--override-pooler-config": "see --pooling",
    "--pooler-config": "see --pooling",
    "--calculate-kv-scales": "scales of KV pages are computed as they are written; see --kv-cache-dtype",
    "--fully-sharded-loras": "adapters are small, and whole on each device where their layer's inputs are",
    "--lora-dtype": "adapters are kept in the model's type; see --dtype",
    "--enable-tower-connector-lora": _NO_MEDIA,
    "--limit-mm-per-prompt": _NO_MEDIA,
    "--allowed-local-media-path": _NO_MEDIA,
    "--mm-processor-kwargs": _NO_MEDIA,
    "--interleave-mm-strings": _NO_MEDIA,
    "--scheduling-policy": "requests run by their field priority, and in their order where it is the same",
    "--guided-decoding-backend": _ONE_GRAMMAR,
    "--structured-outputs-config": _ONE_GRAMMAR,
    "--return-tokens-as-token-ids": "it is a field of requests",
    "--response-role": "answers are always the assistant's",
    "--ssl-ciphers": "TLS 1.2 and 1.3 with the ciphers that Python recommends",
    "--enable-ssl-refresh": "SIGHUP has the certificate read again",
    "--collect-detailed-traces": "traces always have each phase; see --otlp-traces-endpoint",
    "--uvicorn-log-level": "see --log-level",
    "--max-log-len": "prompts are logged whole or not at all; see --log-prompts",
    "--enable-log-outputs": "see --log-prompts, which logs prompts and answers",
    "--disable-fastapi-docs": "/docs is always there; it tells nothing that the documentation does not",
}
"""Flags that are not taken, and why."""


LORA_MODULES = "--lora-modules"
"""Takes several values in vLLM, one after the other."""


def translated(arguments: Sequence[str]) -> list[str]:
    """A command line in our own words. Raises ConfigError for a flag that cannot be honoured."""
    found: list[str] = []
    arguments = _with_modules_joined(arguments)
    for at, argument in enumerate(arguments):
        if argument == "--":
            return [*found, *arguments[at:]]
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name  # vLLM takes both
        if name in REFUSED:
            raise ConfigError(f"{name} is not available: {REFUSED[name]}")
        if name not in ALWAYS_SO:
            found.append(f"{RENAMED.get(name, name)}{equals}{value}")
        elif equals:
            raise ConfigError(f"{name} is {value!r}; it takes no value")
        else:
            logger.warning("%s has no effect: %s", name, ALWAYS_SO[name])
    return found


def _with_modules_joined(arguments: Sequence[str]) -> list[str]:
    """`--lora-modules a=x b=y` -> `--lora-modules ["a=x", "b=y"]`: all that follow and look like a module."""
    found: list[str] = []
    left = list(arguments)
    while left:
        argument = left.pop(0)
        found.append(argument)
        if argument == "--":
            return found + left
        if argument.replace("_", "-") != LORA_MODULES:
            continue
        modules = []
        while left and not left[0].startswith("-") and ("=" in left[0] or left[0].startswith("{")):
            modules.append(left.pop(0))
        found += modules if len(modules) < 2 else [json.dumps(modules)]
    return found
