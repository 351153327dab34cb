"""The flags and variables of other servers, and what becomes of each here, for messages and docs/coming-from.md.

Those that have another name here are in this file, those that have no effect or are refused in others.toml, by the
reason. `-c/--ctx-size=` is one flag under its names. After `=` stands what it takes: nothing is one value, `*` any
number, `?` one or none, and `a|b` one value, of which only these can be honoured (patterns in which letter case means
nothing).
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jaxllm.config.values import comma_separated, parse_object, parse_seconds

Flags = Mapping[str, str | None]
"""Flags of ours with their values; None is a switch's. A dotted flag is one value of an object. $NAME is an environment
variable; @repo and @file name a model together, @address and @port a coordinator."""
Value = str | Callable[[str], str | Flags | None] | None
"""The same value (None), another, or one made of theirs, which is None where it changes nothing here."""
Meaning = str | tuple[str, Value]
"""The flag here, and its value if that is not the same."""


def unless(*neutral: str, unit: str = "") -> Callable[[str], str | None]:
    """The value, but for those that mean "as it would be without"."""
    return lambda value: None if value.lower() in neutral else value + unit


def one_of(words: Mapping[str, str | None]) -> Callable[[str], str | None]:
    def translate(value: str) -> str | None:
        if value.lower() not in words:
            raise ValueError(f"accepted are {', '.join(words)}")
        return words[value.lower()]

    return translate


def _number(value: str) -> float:
    with suppress(ValueError):
        if math.isfinite(number := float(value)):
            return number
    raise ValueError("accepted is a number")


def _devices(numbers: str) -> Flags:
    """`0,1`, of which each has a part of the model."""
    if not re.fullmatch(r"\d+(,\d+)*", numbers):
        raise ValueError("accepted are numbers of devices, as 0,1")
    return {"$CUDA_VISIBLE_DEVICES": numbers, "--tensor-parallel-size": str(numbers.count(",") + 1)}


def address(value: str, host: str = "--host", port: str = "--port", default: str | None = None) -> Flags:
    """`0.0.0.0:8080`, `:8080`, `http://localhost` or `[::1]:80` as two flags; the ones that are not there are not."""
    found = re.fullmatch(r"(?:\w+://)?(\[[^]]*\]|[^:/]*)(?::(\d*))?/*", value.strip())
    if found is None:
        raise ValueError("accepted is HOST:PORT")
    both = {host: found[1].strip("[]"), port: found[2] or default or ""}
    return {flag: text for flag, text in both.items() if text}


def _lifetime(value: str) -> str | None:
    seconds = parse_seconds(value)
    if seconds == 0:
        raise ValueError("a model that is loaded stays for the next request; see --model-ttl")
    return None if seconds < 0 else str(seconds)


def _plain_origins(value: str) -> str:
    if any("*" in origin and origin != "*" for origin in comma_separated(value)):
        raise ValueError("origins are whole here; see --allowed-origins")
    return value


def _scaled(key: str) -> str:
    return f"--hf-overrides.rope_parameters.{key}"


def _inverse(value: str) -> Flags:
    if (scale := _number(value)) <= 0:
        raise ValueError("accepted is a number above 0")
    return {_scaled("rope_type"): "linear", _scaled("factor"): str(1 / scale)}


_PAGES = {"fp8_e4m3": "fp8", "bfloat16": "auto", "float16": "auto", "int8_per_token_head": "int8"}

VLLM: Mapping[str, Meaning] = {
    "-tp=": "--tensor-parallel-size", "-pp=": "--pipeline-parallel-size", "-dp=": "--data-parallel-size",
    "-ep": "--enable-expert-parallel", "-q=": "--quantization", "-sc=": "--speculative-config",
    "--spec-method=": "--speculative-config.method", "--spec-model=": "--speculative-config.model",
    "--spec-tokens=": "--speculative-config.num_speculative_tokens", "-n/--nnodes=": "--num-processes",
    "-r/--node-rank=": "--process-id", "--master-addr=": "@address", "--master-port=": "@port",
    "--device-memory-utilization=": "--gpu-memory-utilization", "--kv-cache-memory-bytes=": "--kv-cache-memory",
    "--kv-offloading-size=": ("--kv-offload-memory", unless(unit="GiB")), "--max-num-queued-reqs=": "--max-num-waiting",
    "--sse-keep-alive-interval=": "--sse-keep-alive", "--enable-log-requests": "--enable-request-logging",
    "--disable-frontend-multiprocessing": "--no-engine-process",
    "--rope-scaling=": ("--hf-overrides.rope_parameters", lambda value: json.dumps(parse_object(value))),
    "--rope-theta=": _scaled("rope_theta"), "--hf-token=?": "$HF_TOKEN", "--device-ids=": "$CUDA_VISIBLE_DEVICES",
    "--numa-bind": ("--numa-node", "auto"),
    "--device=": ("$JAX_PLATFORMS", one_of({"cpu": "cpu", "auto": None, "cuda": None, "gpu": None, "tpu": None})),
    "--seed=": ("--seed", unless("-1", "none")), "--log-level=": ("--log-level", str.lower),
    "--kv-cache-dtype=": ("--kv-cache-dtype", lambda value: _PAGES.get(value, value)),
}  # fmt: skip
"""Most flags have vLLM's name, and are not listed."""

_DEFAULTS = "--override-generation-config."
_VARIABLES = "--default-chat-template-kwargs."
_SAMPLING: Mapping[str, Meaning] = {
    "--temp/--temperature=": _DEFAULTS + "temperature",
    "--top-k=": (_DEFAULTS + "top_k", lambda value: str(int(_number(value)))), "--top-p=": _DEFAULTS + "top_p",
    "--min-p=": _DEFAULTS + "min_p", "--presence-penalty=": _DEFAULTS + "presence_penalty",
    "--frequency-penalty=": _DEFAULTS + "frequency_penalty",
}  # fmt: skip
_KV = one_of({"f16": "auto", "bf16": "auto", "q8_0": "int8"})
_VERBOSITY = one_of({"0": "error", "1": "error", "2": "warning", "3": "info", "4": "info", "5": "debug"})
_METHODS = one_of({
    "none": None, "draft-simple": "draft_model", "draft-eagle3": "eagle3", "draft-mtp": "mtp", "ngram-simple": "ngram",
    "ngram-cache": "suffix",
})  # fmt: skip

LLAMA: Mapping[str, Meaning] = {
    "-m/--model=": "--model", "-hf/-hfr/--hf-repo=": "@repo", "-hff/--hf-file=": "@file",
    "-hft/--hf-token=": "$HF_TOKEN", "--usage": "--help", "--offline": ("$HF_HUB_OFFLINE", "1"),
    "-a/--alias=": "--served-model-name", "-c/--ctx-size=": ("--max-model-len", unless("0")),
    "-np/--parallel=": ("--max-num-seqs", unless("-1")), "-ub/--ubatch-size=": "--max-num-batched-tokens",
    "-ctk/--cache-type-k=": ("--kv-cache-dtype", _KV), "-ctv/--cache-type-v=": ("--kv-cache-dtype", _KV),
    "-cram/--cache-ram=": ("--kv-offload-memory", unless("0", unit="MiB")),
    "-dev/--device=": ("$JAX_PLATFORMS", one_of({"none": "cpu"})),
    "-ngl/--gpu-layers/--n-gpu-layers=": ("$JAX_PLATFORMS", lambda value: "cpu" if value == "0" else None),
    "--numa=": ("--numa-node", one_of({"distribute": "auto", "isolate": "auto", "numactl": None})),
    "-s/--seed=": ("--seed", unless("-1")), **_SAMPLING, "--repeat-penalty=": _DEFAULTS + "repetition_penalty",
    "-n/--predict/--n-predict=": (_DEFAULTS + "max_new_tokens", unless("-1", "-2")),
    "--rope-scaling=": (_scaled("rope_type"), one_of({"none": "default", "linear": "linear", "yarn": "yarn"})),
    "--rope-scale=": _scaled("factor"), "--rope-freq-base=": (_scaled("rope_theta"), unless("0")),
    "--rope-freq-scale=": (_scaled("factor"), _inverse),
    "--yarn-orig-ctx=": (_scaled("original_max_position_embeddings"), unless("0")),
    "--yarn-attn-factor=": (_scaled("attention_factor"), unless("-1", "-1.0")),
    "--yarn-beta-slow=": (_scaled("beta_slow"), unless("-1", "-1.0")),
    "--yarn-beta-fast=": (_scaled("beta_fast"), unless("-1", "-1.0")), "--pooling=": ("--pooling", unless("rank")),
    "--host=": ("--host", lambda value: {"--uds": value} if value.endswith(".sock") else value),
    "--ui/--webui": "--web", "--api-prefix=": "--root-path",
    "--cors-origins=": ("--allowed-origins", unless("localhost")), "--ssl-key-file=": "--ssl-keyfile",
    "--ssl-cert-file=": "--ssl-certfile", "--cache-prompt": "--enable-prefix-caching",
    "-to/--timeout=": "--send-timeout", "--sse-ping-interval=": "--sse-keep-alive",
    "--chat-template-file=": "--chat-template", "--chat-template-kwargs=": "--default-chat-template-kwargs",
    "--reasoning-format=": ("--reasoning-parser", one_of({"none": "none", "deepseek": "auto", "auto": "auto"})),
    "--skip-chat-parsing": ("--reasoning-parser", "none"),
    "-rea/--reasoning=": (_VARIABLES + "enable_thinking", one_of({"on": "true", "off": "false", "auto": None})),
    "--reasoning-effort=": (_VARIABLES + "reasoning_effort", unless("default")),
    "--reasoning-budget=": (_VARIABLES + "enable_thinking", one_of({"0": "false", "-1": None})),
    "--mcp-servers-config=": "--mcp-config", "--models-dir=": "--model-directory",
    "--models-max=": ("--max-loaded-models", unless("0")), "--sleep-idle-seconds=": ("--model-ttl", unless("-1")),
    "-v/--verbose/--log-verbose": ("--log-level", "debug"), "--log-jsonl": ("--log-format", "json"),
    "-lv/--verbosity/--log-verbosity=": ("--log-level", _VERBOSITY),
    "--log-disable": ("--log-level", "error"), "--spec-draft-model/-md/--model-draft=": "--speculative-config.model",
    "--spec-draft-hf/-hfd/-hfrd/--hf-repo-draft=": "--speculative-config.model",
    "--spec-draft-n-max/--draft/--draft-n/--draft-max=": "--speculative-config.num_speculative_tokens",
    "--spec-type=": ("--speculative-config.method", _METHODS),
}  # fmt: skip

CANDLE: Mapping[str, Meaning] = {
    "--h=": "--host", "--p=": "--port", "--m=": "@repo", "--w=": "@repo", "--f=": "@file",
    "--d=": ("--tensor-parallel-size", _devices), "--cpu": ("$JAX_PLATFORMS", "cpu"), "--hf-token=": "$HF_TOKEN",
    "--hf-token-path=": "$HF_TOKEN_PATH", "--mem=": ("--kv-cache-memory", unless(unit="MiB")),
    "--kvcache-mem-gpu=": ("--kv-cache-memory", unless(unit="MiB")),
    "--prefill-chunk-size=": ("--max-num-batched-tokens", unless("0")), "--fp8-kvcache": ("--kv-cache-dtype", "fp8"),
    **_SAMPLING, "--max-gen-tokens=": _DEFAULTS + "max_new_tokens", "--verbose": "--enable-request-logging",
    "--enforce-parser=": "--tool-call-parser",
}  # fmt: skip
RUST_DE_LLAMA: Mapping[str, Meaning] = {
    "--address=": ("--host", address), "--n-parallel=": "--max-num-seqs",
    "--monitor-address=": ("--monitor-host", lambda value: address(value, "--monitor-host", "--monitor-port")),
    "--n-ctx=": ("--max-model-len", unless("0")), "--n-ubatch=": "--max-num-batched-tokens",
}  # fmt: skip
VARIABLES: Mapping[str, Meaning] = {
    "OLLAMA_HOST": ("--host", lambda value: address(value, default="11434")),
    "OLLAMA_CONTEXT_LENGTH": ("--max-model-len", unless("0")), "OLLAMA_MAX_QUEUE": "--max-num-waiting",
    "OLLAMA_KEEP_ALIVE": ("--model-ttl", _lifetime), "OLLAMA_MAX_LOADED_MODELS": ("--max-loaded-models", unless("0")),
    "OLLAMA_NUM_PARALLEL": ("--max-num-seqs", unless("0")), "OLLAMA_KV_CACHE_TYPE": ("--kv-cache-dtype", _KV),
    "OLLAMA_ORIGINS": ("--allowed-origins", _plain_origins),
    "OLLAMA_DEBUG": ("--log-level", one_of({"0": None, "false": None, "1": "debug", "true": "debug", "2": "debug"})),
    "VLLM_CPU_KVCACHE_SPACE": ("--kv-cache-memory", unless(unit="GiB")),
    "VLLM_LOGGING_LEVEL": ("--log-level", one_of({level: level for level in ("debug", "info", "warning", "error")})),
}  # fmt: skip
"""LLAMA_ARG_… are the flags of llama-server, and no list of their own; keys are in `config.server`."""

LLAMA_VARIABLES = {
    "BATCH": "batch-size", "UBATCH": "ubatch-size", "N_PARALLEL": "parallel", "ROPE_SCALING_TYPE": "rope-scaling",
    "SPEC_DRAFT_CACHE_TYPE_K": "cache-type-k-draft", "SPEC_DRAFT_CACHE_TYPE_V": "cache-type-v-draft",
    "SPEC_DRAFT_HF_REPO": "hf-repo-draft", "CHECKPOINT_MIN_SPACING_NT": "checkpoint-min-step", "STATIC_PATH": "path",
    "ENDPOINT_METRICS": "metrics", "ENDPOINT_PROPS": "props", "ENDPOINT_SLOTS": "slots", "THINK": "reasoning-format",
    "THINK_BUDGET": "reasoning-budget", "THINK_BUDGET_MESSAGE": "reasoning-budget-message",
}  # fmt: skip
"""LLAMA_ARG_BATCH is --batch-size; the others have their flag's longest name."""


SWITCHES = dict.fromkeys(("1", "true", "on", "enabled", ""), True) | dict.fromkeys(
    ("0", "false", "off", "disabled"), False
)
"""What a variable of llama-server may say of a flag that takes no value."""
LLAMA_SERVER = "llama-server"
RENAMED: Mapping[str, Mapping[str, Meaning]] = {
    "vLLM": VLLM, LLAMA_SERVER: LLAMA, "candle-vllm": CANDLE, "rust_de_llama": RUST_DE_LLAMA,
}  # fmt: skip
"""By server, the flags that have another name here."""


class Row(NamedTuple):
    """One flag of one server: its names, what it takes, and the flag here or the reason."""

    server: str
    names: tuple[str, ...]
    takes: str
    only: tuple[str, ...]
    fate: str
    """renamed, ignored or refused."""
    ours: str
    value: Value
    why: str

    def accepts(self, value: str) -> bool:
        return not self.only or any(fnmatchcase(value.lower(), pattern) for pattern in self.only)

    def means(self, value: str | None) -> Flags:
        """The flags here that it stands for with this value. Raises ValueError where it cannot be honoured."""
        if not callable(self.value):
            return {self.ours: value if self.value is None else self.value}
        found = self.value(value or "")
        return {} if found is None else {self.ours: found} if isinstance(found, str) else found


def _row(server: str, text: str, fate: str, meaning: Meaning = "", why: str = "") -> Row:
    names, equals, takes = text.partition("=")
    number = takes if takes in ("*", "?") else "1" if equals else ""
    only = tuple(takes.split("|")) if takes not in ("", "*", "?") else ()
    ours, value = (meaning, None) if isinstance(meaning, str) else meaning
    return Row(server, tuple(names.split("/")), number, only, fate, ours, value, why)


@cache
def reasons() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """ignored or refused -> the reason -> the flags of a server, or under "variables" patterns of their names."""
    return tomllib.loads(Path(__file__).with_name("others.toml").read_text(encoding="utf-8"))


@cache
def rows() -> list[Row]:
    """Every flag of every server."""
    found = [
        _row(server, names, "renamed", meaning) for server, all in RENAMED.items() for names, meaning in all.items()
    ]
    for fate, by_reason in reasons().items():
        for why, by_server in by_reason.items():
            flags = ((server, flag) for server in RENAMED for flag in by_server.get(server, "").split())
            found += [_row(server, flag, fate, why=why) for server, flag in flags]
    return found


@cache
def by_name() -> Mapping[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows():
        for name in row.names:
            found.setdefault(name, []).append(row)
    return found


def of_variable(name: str, value: str, ours: Collection[str]) -> Flags | str:
    """The flags, as their server has them, that an environment variable of it stands for, or why it has no effect."""
    if name in VARIABLES:
        try:
            return _row("", f"{name}=", "renamed", VARIABLES[name]).means(value)
        except ValueError as error:
            return str(error)
    if name.startswith("LLAMA_ARG_"):
        name = name.removeprefix("LLAMA_ARG_")
        flag = f"--{LLAMA_VARIABLES.get(name, name.lower().replace('_', '-'))}"
        row = next((row for row in by_name().get(flag.replace("--no-", "--"), ()) if row.server == LLAMA_SERVER), None)
        if (row is None and flag in ours) or (row is not None and row.takes and flag in row.names):
            return {flag: value}
        if row is not None:
            if value.lower() not in SWITCHES:
                return f"accepted are {', '.join(filter(None, SWITCHES))}"
            opposite = flag.replace("--no-", "--") if "--no-" in flag else f"--no-{flag[2:]}"
            return {flag if SWITCHES[value.lower()] else opposite: None}
    patterns = ((why, one) for why, by in reasons()["ignored"].items() for one in by.get("variables", "").split())
    return next(why for why, pattern in patterns if fnmatchcase(name, pattern))
