"""The flags of other servers, and what becomes of each here: the one table for messages and docs/coming-from.md.

`-c/--ctx-size=` is one flag under its names. After `=` stands what it takes: nothing is one value, `*` any number, `?`
one or none, and `a|b` one value, of which only these can be honoured (patterns in which letter case means nothing).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, NamedTuple

from jaxllm.config.values import comma_separated, parse_seconds

Flags = Mapping[str, str | None]
"""Flags of ours with their values; None is a switch's. A dotted flag is one value of an object. $NAME is an environment
variable; @repo and @file name a model together, @address and @port a coordinator."""
Meaning = tuple[str, str | Callable[[str], str | Flags | None] | None]
"""The flag here, and its value: the same (None), another, or made of theirs; none is made of theirs if it changes
nothing here."""


def unless(*neutral: str, as_is: Callable[[str], str] = str) -> Callable[[str], str | None]:
    """The value, but for those that mean "as it would be without"."""
    return lambda value: None if value.lower() in neutral else as_is(value)


def one_of(words: Mapping[str, str | None]) -> Callable[[str], str | None]:
    def translate(value: str) -> str | None:
        if value.lower() not in words:
            raise ValueError(f"accepted are {', '.join(words)}")
        return words[value.lower()]

    return translate


def _megabytes(value: str) -> str:
    return f"{value}MiB"


def _whole(value: str) -> str:
    return str(int(float(value)))


def _named(devices: str) -> Flags:
    """`0,1`, of which each has a part of the model."""
    return {"$CUDA_VISIBLE_DEVICES": devices, "--tensor-parallel-size": str(len(devices.split(",")))}


def _host(value: str) -> str | Flags:
    return {"--uds": value} if value.endswith(".sock") else value


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
    if float(value) <= 0:
        raise ValueError("accepted is a number above 0")
    return {_scaled("rope_type"): "linear", _scaled("factor"): str(1 / float(value))}


CODE = "it would run code that came with a model or from a file"
TEXT = "models are served for text only"
CHUNKS = "prompts are always computed in chunks; --max-num-batched-tokens says how long they are"
COMPILED = "steps are compiled by XLA; see --enforce-eager, --decode-buckets and --prefill-buckets"
KERNELS = "the kernels are jaxllm's own, and the device chooses among them"
READ = "it is read from the checkpoint"
PLANNED = "what needs memory is planned before the start; see --gpu-memory-utilization and --kv-cache-memory"
CORES = "all cores that the process may use; taskset or a container's limit gives it fewer"
DRAFTS = "see --speculative-config, which has its own methods and settings"
SAMPLED = "a server has no default for it; it is a field of requests where the API has it"
REQUESTS = "requests are logged with --enable-request-logging or --log-format json only"
STATES = "states of recurrent layers are kept as the model asks, at the ends of pages"
PLACED = "weights are on the device, or on the CPU with JAX_PLATFORMS=cpu; --isq makes them smaller"
EXPERTS = "see --num-experts-offload-per-rank, which leaves experts of each layer in host memory"
COLLECTIVES = "devices of one model exchange what they compute by XLA's collectives"
ENGINES = "engines of one server are on one machine: see --data-parallel-size; a router stands before several servers"
GRAMMARS = "grammars are always llguidance's"
LOG = "the log goes to standard error, in the form that --log-format and --log-level say"

_PAGES = {"fp8_e4m3": "fp8", "bfloat16": "auto", "float16": "auto", "int8_per_token_head": "int8"}

VLLM: Mapping[str, Meaning] = {
    "-tp=": ("--tensor-parallel-size", None), "-pp=": ("--pipeline-parallel-size", None),
    "-dp=": ("--data-parallel-size", None), "-ep": ("--enable-expert-parallel", None), "-q=": ("--quantization", None),
    "-sc=": ("--speculative-config", None), "--spec-method=": ("--speculative-config.method", None),
    "--spec-model=": ("--speculative-config.model", None),
    "--spec-tokens=": ("--speculative-config.num_speculative_tokens", None),
    "-n/--nnodes=": ("--num-processes", None), "-r/--node-rank=": ("--process-id", None),
    "--master-addr=": ("@address", None), "--master-port=": ("@port", None),
    "--device-memory-utilization=": ("--gpu-memory-utilization", None),
    "--kv-cache-memory-bytes=": ("--kv-cache-memory", None),
    "--kv-offloading-size=": ("--kv-offload-memory", lambda value: f"{value}GiB"),
    "--max-num-queued-reqs=": ("--max-num-waiting", None),
    "--sse-keep-alive-interval=": ("--sse-keep-alive", None),
    "--enable-log-requests": ("--enable-request-logging", None),
    "--disable-frontend-multiprocessing": ("--no-engine-process", None),
    "--rope-scaling=": ("--hf-overrides.rope_parameters", None), "--rope-theta=": (_scaled("rope_theta"), None),
    "--hf-token=?": ("$HF_TOKEN", None), "--device-ids=": ("$CUDA_VISIBLE_DEVICES", None),
    "--numa-bind": ("--numa-node", "auto"),
    "--device=": ("$JAX_PLATFORMS", one_of({"cpu": "cpu", "auto": None, "cuda": None, "gpu": None, "tpu": None})),
    "--seed=": ("--seed", unless("-1", "none")), "--log-level=": ("--log-level", str.lower),
    "--kv-cache-dtype=": ("--kv-cache-dtype", lambda value: _PAGES.get(value, value)),
}  # fmt: skip
"""Most flags have vLLM's name, and are not listed."""

VLLM_IGNORED = {
    "no code that came with a model is run, and none is needed": "--trust-remote-code --code-revision=",
    TEXT: "--limit-mm-per-prompt= --allowed-local-media-path= --allowed-media-domains=* --mm-processor-kwargs= "
    "--interleave-mm-strings --language-model-only --enable-mm-embeds --media-io-kwargs= --mm-processor-cache-gb= "
    "--mm-processor-cache-type= --mm-hasher-algorithm= --mm-shm-cache-max-object-size-mb= --mm-encoder-tp-mode= "
    "--mm-encoder-attn-backend= --mm-encoder-attn-dtype= --mm-encoder-fp8-scale-path= "
    "--mm-encoder-fp8-scale-save-path= --mm-encoder-fp8-scale-save-margin= --skip-mm-profiling --video-pruning-rate= "
    "--video-pruning-method= --mm-tensor-ipc= --mm-processor-device= --mm-ipc-gpu-memory-gb= --mm-device-do-normalize "
    "--disable-chunked-mm-input --trust-request-mm-kwargs --enable-tower-connector-lora --default-mm-loras= "
    "--ec-manager-config= --disable-mm-preprocessor-cache",
    COMPILED: "-O= -cc/--compilation-config= --optimization-level= --performance-mode= --max-seq-len-to-capture= "
    "--cuda-graph-sizes=* --cudagraph-capture-sizes=* --max-cudagraph-capture-size= --cudagraph-metrics "
    "--jit-monitor-mode= --jit-monitor-verbose --enable-flashinfer-autotune --disable-flashinfer-autotune",
    KERNELS: "-ac/--attention-config= --moe-backend= --linear-backend= --kernel-config= --ir-op-priority= --monokernel "
    "--gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend= --mamba-backend= --mamba-ssu-algorithm= "
    "--sparse-indexer-topk-backend= --disable-cascade-attn --use-fp64-gumbel "
    "--attention-backend=*attn*|*attention*|*mla*|*flash*|*aiter*|*triton*|*sdpa*|xformers|flex*",
    "pages have 8 to 128 tokens here, and the default suits every device": "--block-size=1|256|512|1024",
    "a layer's window is what the checkpoint says": "--disable-sliding-window",
    "prompts that begin alike are found by their tokens": "--prefix-caching-hash-algo=",
    STATES: "--mamba-cache-dtype= --mamba-ssm-cache-dtype= --mamba-block-size= --mamba-cache-mode= "
    "--prefix-match-unit= --enable-mamba-shared-prefix-checkpoint --enable-mamba-cache-stochastic-rounding "
    "--mamba-cache-philox-rounds= --use-replayssm --replayssm-buffer-len=",
    COLLECTIVES: "--all2all-backend= --disable-custom-all-reduce --disable-nccl-for-dp-synchronization "
    "--dcp-comm-backend= --dcp-q-replicate --dcp-kv-cache-interleave-size= --cp-kv-cache-interleave-size= "
    "--distributed-timeout-seconds= --cpu-distributed-timeout-seconds= --enable-shm-tensor-arena --dp-sync-interval= "
    "--enable-hc-sp --enable-batch-sharded-sampling --enable-nccl-comm-suspend --ray-workers-use-nsight --enable-dbo "
    "--ubatch-size= --dbo-decode-token-threshold= --dbo-prefill-token-threshold=",
    "experts stay on the devices that they are loaded to; answers are the same": "--enable-eplb --eplb-config= "
    "--expert-placement-strategy= --enable-ep-weight-filter",
    PLANNED: "--enable-cumem-allocator --scheduler-reserve-full-isl --watermark= --disable-hybrid-kv-cache-manager "
    "--kv-sharing-fast-prefill --swa-bounded-replay --prefix-cache-retention-interval=",
    "as many requests run as --max-num-seqs says": "--max-num-active-seqs=",
    "pages that have lost their place are computed again, or found in --kv-offload-memory": "--swap-space= "
    "--kv-offloading-backend=native",
    "weights are read by several threads into the places where they stay": "--safetensors-load-strategy= "
    "--safetensors-prefetch-num-threads= --safetensors-prefetch-block-size= --model-loader-extra-config= "
    "--ignore-patterns=* --use-tqdm-on-load --pt-load-map-location= --max-parallel-loading-workers= "
    "--load-format=hf|pt|npcache|mistral|fastsafetensors|instanttensor|runai_streamer*|sharded_state|modelexpress",
    READ: "--task= --runner= --convert= --model-impl= --tokenizer-mode= --config-format= "
    "--allow-deprecated-quantization --tokenizer-pool-size= --lora-target-modules=* --max-lora-cls-labels=",
    CHUNKS: "--enable-chunked-prefill --long-prefill-token-threshold= --long-prefill-token-threshold-adaptive "
    "--prefill-schedule-interval= --max-num-scheduled-tokens= --max-num-partial-prefills= --max-long-partial-prefills=",
    "the next step is always dispatched before the last one is read": "--async-scheduling --num-scheduler-steps=",
    "requests run by their field priority, else in their order": "--scheduling-policy=fcfs|priority",
    GRAMMARS: "--guided-decoding-backend= --structured-outputs-config= --reasoning-config=",
    "adapters are small, and whole on each device where their layer's inputs are": "--fully-sharded-loras "
    "--specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras",
    "adapters are kept in the model's type; see --dtype": "--lora-dtype=",
    "the model always chooses where the request lets it; see --tool-call-parser": "--enable-auto-tool-choice",
    "tools are never shown to the model where tool_choice is none": "--exclude-tools-when-tool-choice-none",
    "a request's own template is always rendered, in a process of its own": "--trust-request-chat-template",
    "answers are always the assistant's": "--response-role=assistant",
    "of several processes only the first answers requests; see --process-id": "--headless",
    "one process answers all requests": "-asc/--api-server-count= --renderer-num-workers= --h11-max-header-count= "
    "--h11-max-incomplete-event-size= --max-concurrent-workers=",
    REQUESTS: "--disable-log-requests --disable-uvicorn-access-log --disable-access-log-for-endpoints= "
    "--no-enable-log-requests --enable-log-deltas",
    LOG: "--uvicorn-log-level= --log-error-stack",
    "prompts are logged whole or not at all; see --log-prompts": "--max-log-len=",
    "statistics are never logged; /metrics has them": "--disable-log-stats --aggregate-engine-logging "
    "--enable-logging-iteration-details --show-hidden-metrics-for-version= --kv-cache-metrics "
    "--kv-cache-metrics-sample= --enable-mfu-metrics --per-request-spec-decode-metrics=",
    "traces always have each phase; see --otlp-traces-endpoint": "--collect-detailed-traces=*",
    "usage always has cached_tokens": "--enable-prompt-tokens-details",
    "responses always have X-Request-Id": "--enable-request-id-headers",
    "/load always counts": "--enable-server-load-tracking",
    "/sleep always puts a model to sleep": "--enable-sleep-mode --sleep-mode-backend= --sleep-mode-offload-cudagraph "
    "--sleep-preserve-parameter-names=*",
    "/docs needs no network": "--enable-offline-docs",
    "--allowed-origins allows every method and header": "--allowed-methods=* --allowed-headers=*",
    "variables that name no setting always end the start": "--fail-on-environ-validation",
    "scales of KV pages are computed as they are written; see --kv-cache-dtype": "--calculate-kv-scales",
    "it is for plug-ins of vLLM": "--additional-config=",
    "processes of one machine need nothing": "--distributed-executor-backend=mp|uni -dpb/--data-parallel-backend=mp",
    "accepted is 1": "-dcp/--decode-context-parallel-size=1 -pcp/--prefill-context-parallel-size=1",
}
"""What is so without them, or needs nothing."""

VLLM_REFUSED = {
    CODE: "--tool-parser-plugin= --reasoning-parser-plugin= --logits-processors=* --middleware=* --worker-cls= "
    "--worker-extension-cls= --scheduler-cls= --io-processor-plugin= --model-class-overrides=",
    "weights stay on the devices; see --isq for smaller ones": "--cpu-offload-gb= --cpu-offload-params=* "
    "--offload-backend= --offload-group-size= --offload-num-in-group= --offload-prefetch-step= --offload-params=*",
    "see --kv-cache-memory": "--num-gpu-blocks-override=",
    ENGINES: "-dpn/--data-parallel-rank= -dpr/--data-parallel-start-rank= -dpl/--data-parallel-size-local= "
    "-dpa/--data-parallel-address= -dpp/--data-parallel-rpc-port= -dph/--data-parallel-hybrid-lb "
    "-dpe/--data-parallel-external-lb -dpm/--data-parallel-multi-port-external-lb --data-parallel-supervisor-port= "
    "--dp-supervisor-probe-interval-s= --dp-supervisor-probe-timeout-s= --dp-supervisor-probe-failure-threshold= "
    "--enable-elastic-ep --elastic-ep-max-dp-size=",
    "a server ends where its engine does, and whatever started it starts it again": "--enable-fault-tolerance "
    "--fault-tolerance-config= --watchdog-config=",
    "see --numa-node, and taskset": "--numa-bind-nodes=* --numa-bind-cpus=*",
    "see --hf-overrides": "--hf-config-path=",
    "see --revision, which is the tokenizer's too": "--tokenizer-revision=",
    "see --isq, which quantizes while loading": "--quantization-config=",
    "see --pooling": "--override-pooler-config= --pooler-config= --enable-flash-late-interaction",
    "see --kv-cache-dtype, which is every layer's": "--kv-cache-dtype-skip-layers=*",
    "see --max-num-waiting": "--max-num-queued-tokens=",
    "answers do not have it": "--enable-return-routed-experts --return-sampling-mask --enable-trace-replay "
    "--aux-output-config= --enable-per-request-metrics",
    "models are served for text only, by token after token": "-dc/--diffusion-config= --engram-config= "
    "--mm-encoder-only --ec-transfer-config=",
    "answers are not watermarked": "--watermark-config=",
    "efforts are those of docs/tools.md": "--reasoning-effort-map= --anthropic-disabled-thinking-effort=",
    "a tool's own field strict says it": "--tool-strict-level=",
    "see --mcp-config": "--tool-server=",
    "the server speaks HTTP": "--grpc --grpc-port= --tokens-only --enable-scale-out",
    "there is no such route": "--cohere-is-reasoning-model --cohere-format= --enable-tokenizer-info-endpoint",
    "docs/research.md says how weights are exchanged": "--weight-transfer-config=",
    "the fingerprint is of the model and its settings": "--fingerprint-mode= --fingerprint-value=",
    "it is a field of requests": "--return-tokens-as-token-ids",
    "a browser that sends cookies is not served; see --allowed-origins": "--allow-credentials",
    "TLS 1.2 and 1.3 with the ciphers that Python recommends": "--ssl-ciphers=",
    "SIGHUP has the certificate read again": "--enable-ssl-refresh",
    "see --log-format and --log-level": "--logging-config= --log-config-file=",
    "see --log-prompts, which logs prompts and answers": "--enable-log-outputs",
    "buckets are fixed": "--custom-histogram-buckets=",
    "see `jaxllm profile`": "--profiler-config= --enable-layerwise-nvtx-tracing",
    "/docs is always there; it tells nothing that the documentation does not": "--disable-fastapi-docs",
}

DEFAULTS = "--override-generation-config."
_VARIABLES = "--default-chat-template-kwargs."
_SAMPLING: Mapping[str, Meaning] = {
    "--temp/--temperature=": (DEFAULTS + "temperature", None), "--top-k=": (DEFAULTS + "top_k", _whole),
    "--top-p=": (DEFAULTS + "top_p", None), "--min-p=": (DEFAULTS + "min_p", None),
    "--presence-penalty=": (DEFAULTS + "presence_penalty", None),
    "--frequency-penalty=": (DEFAULTS + "frequency_penalty", None),
}  # fmt: skip
_KV = one_of({"f16": "auto", "bf16": "auto", "q8_0": "int8"})

LLAMA: Mapping[str, Meaning] = {
    "-m/--model=": ("--model", None), "-hf/-hfr/--hf-repo=": ("@repo", None), "-hff/--hf-file=": ("@file", None),
    "-hft/--hf-token=": ("$HF_TOKEN", None), "--usage": ("--help", None), "--offline": ("$HF_HUB_OFFLINE", "1"),
    "-a/--alias=": ("--served-model-name", None), "-c/--ctx-size=": ("--max-model-len", unless("0")),
    "-np/--parallel=": ("--max-num-seqs", unless("-1")), "-ub/--ubatch-size=": ("--max-num-batched-tokens", None),
    "-ctk/--cache-type-k=": ("--kv-cache-dtype", _KV), "-ctv/--cache-type-v=": ("--kv-cache-dtype", _KV),
    "-cram/--cache-ram=": ("--kv-offload-memory", unless("0", as_is=_megabytes)),
    "-dev/--device=": ("$JAX_PLATFORMS", one_of({"none": "cpu"})),
    "-ngl/--gpu-layers/--n-gpu-layers=": ("$JAX_PLATFORMS", lambda value: "cpu" if value == "0" else None),
    "--numa=": ("--numa-node", one_of({"distribute": "auto", "isolate": "auto", "numactl": None})),
    "-s/--seed=": ("--seed", unless("-1")),
    **_SAMPLING, "--repeat-penalty=": (DEFAULTS + "repetition_penalty", None),
    "-n/--predict/--n-predict=": (DEFAULTS + "max_new_tokens", unless("-1", "-2")),
    "--rope-scaling=": (_scaled("rope_type"), one_of({"none": "default", "linear": "linear", "yarn": "yarn"})),
    "--rope-scale=": (_scaled("factor"), None), "--rope-freq-base=": (_scaled("rope_theta"), unless("0")),
    "--rope-freq-scale=": (_scaled("factor"), _inverse),
    "--yarn-orig-ctx=": (_scaled("original_max_position_embeddings"), unless("0")),
    "--yarn-attn-factor=": (_scaled("attention_factor"), unless("-1", "-1.0")),
    "--yarn-beta-slow=": (_scaled("beta_slow"), unless("-1", "-1.0")),
    "--yarn-beta-fast=": (_scaled("beta_fast"), unless("-1", "-1.0")),
    "--pooling=": ("--pooling", unless("rank")), "--host=": ("--host", _host), "--ui/--webui": ("--web", None),
    "--api-prefix=": ("--root-path", None), "--cors-origins=": ("--allowed-origins", unless("localhost")),
    "--ssl-key-file=": ("--ssl-keyfile", None), "--ssl-cert-file=": ("--ssl-certfile", None),
    "--cache-prompt": ("--enable-prefix-caching", None),
    "-to/--timeout=": ("--send-timeout", None), "--sse-ping-interval=": ("--sse-keep-alive", None),
    "--chat-template-file=": ("--chat-template", None),
    "--chat-template-kwargs=": ("--default-chat-template-kwargs", None),
    "--reasoning-format=": ("--reasoning-parser", one_of({"none": "none", "deepseek": "auto", "auto": "auto"})),
    "--skip-chat-parsing": ("--reasoning-parser", "none"),
    "-rea/--reasoning=": (_VARIABLES + "enable_thinking", one_of({"on": "true", "off": "false", "auto": None})),
    "--reasoning-effort=": (_VARIABLES + "reasoning_effort", unless("default")),
    "--reasoning-budget=": (_VARIABLES + "enable_thinking", one_of({"0": "false", "-1": None})),
    "--mcp-servers-config=": ("--mcp-config", None), "--models-dir=": ("--model-directory", None),
    "--models-max=": ("--max-loaded-models", unless("0")), "--sleep-idle-seconds=": ("--model-ttl", unless("-1")),
    "-v/--verbose/--log-verbose": ("--log-level", "debug"), "--log-jsonl": ("--log-format", "json"),
    "-lv/--verbosity/--log-verbosity=": ("--log-level", one_of({
        "0": "error", "1": "error", "2": "warning", "3": "info", "4": "info", "5": "debug"})),
    "--log-disable": ("--log-level", "error"),
    "--spec-draft-model/-md/--model-draft=": ("--speculative-config.model", None),
    "--spec-draft-hf/-hfd/-hfrd/--hf-repo-draft=": ("--speculative-config.model", None),
    "--spec-draft-n-max/--draft/--draft-n/--draft-max=": ("--speculative-config.num_speculative_tokens", None),
    "--spec-type=": ("--speculative-config.method", one_of({
        "none": None, "draft-simple": "draft_model", "draft-eagle3": "eagle3", "draft-mtp": "mtp",
        "ngram-simple": "ngram", "ngram-cache": "suffix"})),
}  # fmt: skip

LLAMA_IGNORED = {
    CORES: "-t/--threads= -tb/--threads-batch= -C/--cpu-mask= -Cr/--cpu-range= --cpu-strict= --prio= --poll= "
    "-Cb/--cpu-mask-batch= -Crb/--cpu-range-batch= --cpu-strict-batch= --prio-batch= --poll-batch= --threads-http= "
    "--spec-draft-threads/-td/--threads-draft= --spec-draft-threads-batch/-tbd/--threads-batch-draft= "
    "--spec-draft-cpu-mask/-Cd/--cpu-mask-draft= --spec-draft-cpu-range/-Crd/--cpu-range-draft= "
    "--spec-draft-cpu-strict/--cpu-strict-draft= --spec-draft-prio/--prio-draft= --spec-draft-poll/--poll-draft= "
    "--spec-draft-cpu-mask-batch/-Cbd/--cpu-mask-batch-draft= --spec-draft-cpu-strict-batch/--cpu-strict-batch-draft= "
    "--spec-draft-prio-batch/--prio-batch-draft= --spec-draft-poll-batch/--poll-batch-draft=",
    CHUNKS: "-b/--batch-size=",
    KERNELS: "-fa/--flash-attn=? --repack/-nr --no-host --op-offload -bs/--backend-sampling "
    "--spec-draft-backend-sampling",
    PLACED: "-sm/--split-mode= -ts/--tensor-split= -mg/--main-gpu= -ot/--override-tensor= -ncffn/--n-cpu-ffn= "
    "-kvo/-nkvo/--kv-offload --spec-draft-device/-devd/--device-draft= "
    "--spec-draft-ngl/-ngld/--gpu-layers-draft/--n-gpu-layers-draft= "
    "--spec-draft-override-tensor/-otd/--override-tensor-draft=",
    EXPERTS: "-cmoe/--cpu-moe -ncmoe/--n-cpu-moe= --moe-cache-mib= --spec-draft-cpu-moe/-cmoed/--cpu-moe-draft "
    "--spec-draft-n-cpu-moe/--spec-draft-ncmoe/-ncmoed/--n-cpu-moe-draft=",
    PLANNED: "-fit/--fit=? -fitt/--fit-target= -fitc/--fit-ctx= -lm/--load-mode= -lzm/--lazy-mode= --mlock --mmap "
    "-dio/--direct-io -dt/--defrag-thold= --check-tensors --swa-full --warmup -kvu/-no-kvu/--kv-unified "
    "-ctxcp/--ctx-checkpoints/--swa-checkpoints= -cms/--checkpoint-min-step= --cache-idle-slots",
    "requests share one cache of prompts, in which those that begin alike are found": "--cache-reuse= --keep= "
    "-sps/--slot-prompt-similarity= --kv-unified-per-slot=",
    "an answer ends where its context does": "--no-context-shift",
    "requests are always batched": "-cb/-nocb/--cont-batching",
    "chat templates are always rendered as Jinja": "--jinja",
    "a request says whether its last message is continued": "--prefill-assistant",
    "penalties count what is in the context": "--repeat-last-n=",
    "/metrics, /props, /v1/embeddings and /rerank are always there": "--metrics --props --slots "
    "--embedding/--embeddings --rerank/--reranking --embd-normalize=2",
    "several models are loaded when they are asked for": "--models-autoload --tags=",
    "the server brings no tools of its own": "-no-ag",
    "templates see earlier reasoning where they ask for it": "--reasoning-preserve",
    "adapters are used by the requests that name them": "--lora-init-without-apply",
    TEXT: "-mm/--mmproj= -mmu/--mmproj-url= --mmproj-auto --mmproj-offload -mmdev/--mmproj-device= --image-min-tokens= "
    "--image-max-tokens= --mtmd-batch-max-tokens= --video-fps= --video-timestamp-interval= --video-ffmpeg-dir= "
    "--media-path=",
    "samplers are applied in one order": "--samplers= --sampler-seq/--sampling-seq=",
    "escapes are for a prompt on the command line": "-e/--escape",
    "/metrics has them": "--perf",
    LOG: "--color=? --log-colors=? --log-prefix --log-timestamps",
    "the page at / has its own settings; --no-web leaves it out": "--ui-config/--webui-config= "
    "--ui-config-file/--webui-config-file= --ui-mcp-proxy/--webui-mcp-proxy",
    "--allowed-origins allows every method and header": "--cors-methods= --cors-headers= --cors-credentials",
    "it is of a sampler that is off": "--dry-multiplier=0|0.0 --xtc-probability=0|0.0 --typical/--typical-p=1|1.0 "
    "--top-nsigma/--top-n-sigma=-1|-1.0 --mirostat=0 --dynatemp-range=0|0.0 --adaptive-target=-1|-1.0 --dry-base= "
    "--dry-allowed-length= --dry-penalty-last-n= --dry-sequence-breaker= --xtc-threshold= --adaptive-decay= "
    "--dynatemp-exp= --mirostat-lr= --mirostat-ent= --yarn-ext-factor=-1|-1.0",
    DRAFTS: "--spec-draft-n-min/--draft-min/--draft-n-min= --spec-draft-p-min/--draft-p-min= "
    "--spec-draft-p-split/--draft-p-split= --spec-draft-type-k/-ctkd/--cache-type-k-draft= "
    "--spec-draft-type-v/-ctvd/--cache-type-v-draft= --spec-draft-sampling=greedy",
}

LLAMA_REFUSED = {
    "`jaxllm list` shows the models here, and `jaxllm completion` a shell's script": "-cl/--cache-list "
    "--completion-bash --list-devices",
    "fetch the file, or name its repository: ORG/NAME:FILE.gguf": "-mu/--model-url= -dr/--docker-repo= "
    "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec "
    "--fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default "
    "--vision-gemma-12b-default",
    "see --hf-overrides": "--override-kv=",
    "see --lora-modules NAME=FILE: requests ask for an adapter by its name": "--lora= --lora-scaled=",
    "`jaxllm convert` adds nothing to weights but adapters": "--control-vector= --control-vector-scaled= "
    "--control-vector-layer-range=*",
    "devices of other machines join with --num-processes": "--rpc=",
    SAMPLED: "--ignore-eos -l/--logit-bias= --grammar= --grammar-file= -j/--json-schema= -jf/--json-schema-file= "
    "-r/--reverse-prompt= --reasoning-budget-message= --spm-infill -sp/--special",
    "a conversation that is full ends; nothing is dropped from it": "--context-shift",
    "see --kv-offload-dir: prompts are found there by what they say": "--slot-save-path=",
    "see --models, a YAML file": "--models-preset=",
    "see --mcp-config, a file": "--mcp-servers-json=",
    "the server brings no tools of its own; see --mcp-config": "--tools= --tools-runtime= -ag/--agent",
    "the server's own page is at /": "--path=",
    "one process listens at a port": "--reuse-port",
    "the log goes to standard error: 2> FILE": "--log-file= --log-prompts-dir=",
    DRAFTS: "-lcs/--lookup-cache-static= -lcd/--lookup-cache-dynamic= --spec-synth-len= --spec-synth-rates= "
    "--spec-ngram-mod-n-min= --spec-ngram-mod-n-max= --spec-ngram-mod-n-match= --spec-ngram-simple-size-n= "
    "--spec-ngram-simple-size-m= --spec-ngram-simple-min-hits= --spec-ngram-map-k-size-n= --spec-ngram-map-k-size-m= "
    "--spec-ngram-map-k-min-hits= --spec-ngram-map-k4v-size-n= --spec-ngram-map-k4v-size-m= "
    "--spec-ngram-map-k4v-min-hits= --spec-ngram-size-n= --spec-ngram-size-m= --spec-ngram-min-hits= --spec-default",
}

CANDLE: Mapping[str, Meaning] = {
    "--h=": ("--host", None), "--p=": ("--port", None), "--m=": ("@repo", None), "--w=": ("@repo", None),
    "--f=": ("@file", None), "--d=": ("--tensor-parallel-size", _named), "--cpu": ("$JAX_PLATFORMS", "cpu"),
    "--hf-token=": ("$HF_TOKEN", None), "--hf-token-path=": ("$HF_TOKEN_PATH", None),
    "--mem=": ("--kv-cache-memory", _megabytes), "--kvcache-mem-gpu=": ("--kv-cache-memory", _megabytes),
    "--prefill-chunk-size=": ("--max-num-batched-tokens", unless("0")), "--fp8-kvcache": ("--kv-cache-dtype", "fp8"),
    **_SAMPLING, "--max-gen-tokens=": (DEFAULTS + "max_new_tokens", None),
    "--verbose": ("--enable-request-logging", None), "--enforce-parser=": ("--tool-call-parser", None),
}  # fmt: skip
CANDLE_IGNORED = {
    LOG: "--log",
    "the page is always at /": "--ui-server",
    "one process has all devices of a model": "--multithread",
    "a request begins with the next step": "--holding-time=",
    "prompts that begin alike are found in the cache": "--prefix-cache --prefix-cache-max-tokens=",
    "see --kv-cache-memory; on a CPU it is host memory": "--kvcache-mem-cpu=",
}
CANDLE_REFUSED = {
    "see --gpu-memory-utilization, a share of the device's whole memory": "--gpu-memory-fraction=",
    "see --mcp-config": "--mcp-command= --mcp-args=",
    "conversations are stored by /v1/conversations": "--record-conversation",
}

RUST_DE_LLAMA: Mapping[str, Meaning] = {
    "--address=": ("--host", address), "--n-parallel=": ("--max-num-seqs", None),
    "--monitor-address=": ("--monitor-host", lambda value: address(value, "--monitor-host", "--monitor-port")),
    "--n-ctx=": ("--max-model-len", unless("0")), "--n-ubatch=": ("--max-num-batched-tokens", None),
}  # fmt: skip
RUST_DE_LLAMA_IGNORED = {CHUNKS: "--n-batch=", CORES: "--n-threads=", EXPERTS: "--n-cpu-moe="}

VARIABLES: Mapping[str, Meaning] = {
    "OLLAMA_HOST": ("--host", lambda value: address(value, default="11434")),
    "OLLAMA_CONTEXT_LENGTH": ("--max-model-len", unless("0")), "OLLAMA_MAX_QUEUE": ("--max-num-waiting", None),
    "OLLAMA_KEEP_ALIVE": ("--model-ttl", _lifetime), "OLLAMA_MAX_LOADED_MODELS": ("--max-loaded-models", unless("0")),
    "OLLAMA_NUM_PARALLEL": ("--max-num-seqs", unless("0")), "OLLAMA_KV_CACHE_TYPE": ("--kv-cache-dtype", _KV),
    "OLLAMA_ORIGINS": ("--allowed-origins", _plain_origins),
    "OLLAMA_DEBUG": ("--log-level", one_of({"0": None, "false": None, "1": "debug", "true": "debug", "2": "debug"})),
    "VLLM_CPU_KVCACHE_SPACE": ("--kv-cache-memory", lambda value: f"{value}GiB"),
    "VLLM_LOGGING_LEVEL": ("--log-level", one_of({level: level for level in ("debug", "info", "warning", "error")})),
}  # fmt: skip
"""LLAMA_ARG_… are the flags of llama-server, and no list of their own; keys are in `config.server`."""

VARIABLES_IGNORED = {
    "it is always so": "OLLAMA_FLASH_ATTENTION VLLM_SERVER_DEV_MODE VLLM_ALLOW_RUNTIME_LORA_UPDATING OLLAMA_NOPRUNE "
    "OLLAMA_MULTIUSER_CACHE OLLAMA_NEW_ENGINE VLLM_ENABLE_V1_MULTIPROCESSING",
    "nothing is sent to anybody": "VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_*",
    "see --download-dir; models of ollama are not read": "OLLAMA_MODELS",
    "several models share the devices that the process may use; see --model-memory": "OLLAMA_SCHED_SPREAD "
    "OLLAMA_GPU_OVERHEAD OLLAMA_LLM_LIBRARY",
    "models come from the hub that HF_ENDPOINT names": "VLLM_USE_MODELSCOPE",
    "see --max-model-len and --hf-overrides": "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
    CORES: "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU",
    "see --log-level and --log-format": "VLLM_CONFIGURE_LOGGING VLLM_LOGGING_*",
    KERNELS: "VLLM_ATTENTION_BACKEND VLLM_ROCM_* VLLM_USE_* VLLM_*FLASHINFER* VLLM_*TRITON* VLLM_*MARLIN* VLLM_*MOE* "
    "VLLM_*CUTLASS* VLLM_*DEEP_GEMM* VLLM_*FUSED* VLLM_*ALLREDUCE* VLLM_*NCCL* VLLM_*LAYOUT*",
    COMPILED: "VLLM_*COMPILE* VLLM_*CUDAGRAPH* VLLM_DISABLE_COMPILE_CACHE",
    "processes of an engine find each other by docs/scale.md": "VLLM_HOST_IP VLLM_PORT VLLM_*RPC* VLLM_DP_* VLLM_RAY_* "
    "VLLM_WORKER_MULTIPROC_METHOD VLLM_*TIMEOUT*",
    "nothing here corresponds to it": "*",
}
"""By the first pattern that fits."""

LLAMA_VARIABLES = {
    "BATCH": "batch-size", "UBATCH": "ubatch-size", "N_PARALLEL": "parallel", "ROPE_SCALING_TYPE": "rope-scaling",
    "SPEC_DRAFT_CACHE_TYPE_K": "cache-type-k-draft", "SPEC_DRAFT_CACHE_TYPE_V": "cache-type-v-draft",
    "SPEC_DRAFT_HF_REPO": "hf-repo-draft", "CHECKPOINT_MIN_SPACING_NT": "checkpoint-min-step", "STATIC_PATH": "path",
    "ENDPOINT_METRICS": "metrics", "ENDPOINT_PROPS": "props", "ENDPOINT_SLOTS": "slots", "THINK": "reasoning-format",
    "THINK_BUDGET": "reasoning-budget", "THINK_BUDGET_MESSAGE": "reasoning-budget-message",
}  # fmt: skip
"""LLAMA_ARG_BATCH is --batch-size; the others have their flag's longest name."""


def of_variable(name: str, value: str, ours: Collection[str]) -> list[str] | str:
    """The flags, as their server has them, that an environment variable of it stands for, or why it has no effect."""
    if name in VARIABLES:
        setting, meaning = VARIABLES[name]
        try:
            found = meaning(value) if callable(meaning) else value
        except ValueError as error:
            return str(error)
        flags = found if isinstance(found, Mapping) else {} if found is None else {setting: found}
        return [text for pair in flags.items() for text in pair if text is not None]
    if name.startswith("LLAMA_ARG_"):
        name = name.removeprefix("LLAMA_ARG_")
        flag = f"--{LLAMA_VARIABLES.get(name, name.lower().replace('_', '-'))}"
        row = next((row for row in by_name().get(flag.replace("--no-", "--"), ()) if row.server == LLAMA_SERVER), None)
        if (row is None and flag in ours) or (row is not None and row.takes and flag in row.names):
            return [flag, value]
        if row is not None:
            is_on = value.lower() in ("1", "true", "on", "enabled", "")
            return [flag] if is_on else [flag.replace("--no-", "--") if "--no-" in flag else "--no-" + flag[2:]]
    return next(why for why, text in VARIABLES_IGNORED.items() for one in text.split() if fnmatchcase(name, one))


LLAMA_SERVER = "llama-server"
Fate = Literal["renamed", "ignored", "refused"]
TABLES: Mapping[str, tuple[Mapping[str, Meaning], Mapping[str, str], Mapping[str, str]]] = {
    "vLLM": (VLLM, VLLM_IGNORED, VLLM_REFUSED), LLAMA_SERVER: (LLAMA, LLAMA_IGNORED, LLAMA_REFUSED),
    "candle-vllm": (CANDLE, CANDLE_IGNORED, CANDLE_REFUSED),
    "rust_de_llama": (RUST_DE_LLAMA, RUST_DE_LLAMA_IGNORED, {}),
}  # fmt: skip
"""By server: what has another name here, what changes nothing, and what is refused; both with the reason."""


class Row(NamedTuple):
    """One flag of one server: its names, what it takes, and the flag here or the reason."""

    server: str
    names: tuple[str, ...]
    takes: str
    only: tuple[str, ...]
    kind: Fate
    ours: str = ""
    value: str | Callable[[str], str | Flags | None] | None = None
    why: str = ""

    def accepts(self, value: str) -> bool:
        return not self.only or any(fnmatchcase(value.lower(), pattern) for pattern in self.only)


def _row(server: str, text: str, kind: Fate, ours: str = "", value: Any = None, why: str = "") -> Row:
    names, equals, takes = text.partition("=")
    number = takes if takes in ("*", "?") else "1" if equals else ""
    only = tuple(takes.split("|")) if takes not in ("", "*", "?") else ()
    return Row(server, tuple(names.split("/")), number, only, kind, ours, value, why)


@cache
def rows() -> list[Row]:
    """Every flag of every server."""
    found = []
    for server, (renamed, ignored, refused) in TABLES.items():
        found += [_row(server, names, "renamed", *meaning) for names, meaning in renamed.items()]
        found += [_row(server, one, "ignored", why=why) for why, text in ignored.items() for one in text.split()]
        found += [_row(server, one, "refused", why=why) for why, text in refused.items() for one in text.split()]
    return found


@cache
def by_name() -> Mapping[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows():
        for name in row.names:
            found.setdefault(name, []).append(row)
    return found
