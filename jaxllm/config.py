"""Every setting of engine and server: one typed tree that YAML, flags, JAXLLM_* variables and LLM(...) fill."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from jaxllm.errors import ConfigError
from jaxllm.folders import user_folder

CACHE_DIR = user_folder("XDG_CACHE_HOME", "~/.cache")
DATA_DIR = user_folder("XDG_DATA_HOME", "~/.local/share")

CPU_ISA_VARIABLE = "JAXLLM_CPU_ISA"
"""The environment variable that forces an instruction set of the C++ kernels. It is no setting of a deployment."""

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(value: Any) -> Any:
    """'2GiB', '500 MB' or 1073741824 -> bytes; anything else is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    number = value.strip().lower().removesuffix("b")
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if number.endswith(unit)), "")
    try:
        return int(float(number.removesuffix(unit)) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        raise ValueError("it must be a number of bytes, such as 4GiB or 500MB") from None


def format_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


Bytes = Annotated[int, BeforeValidator(parse_bytes)]


Isq = Literal[
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2k", "q3k", "q4k", "q5k", "q6k", "int8", "int4", "fp8", "w8a8"
]  # fmt: skip
IsqOrNone = Literal[Isq, "none"]


def parse_sizes(value: Any) -> Any:
    """'8,64' -> [8, 64]; anything else is left for pydantic to judge."""
    if isinstance(value, int):
        return [value]
    return value.split(",") if isinstance(value, str) else value


Sizes = Annotated[frozenset[Annotated[int, Field(ge=1)]], BeforeValidator(parse_sizes)]


def _some(value: str) -> str:
    """An empty text is a mistake: a key that a variable was to hold, and without which anybody may call."""
    if not comma_separated(value):
        raise ValueError("it must have at least one entry; leave it out, or say null, for none")
    return value


SomeOf = Annotated[str, AfterValidator(_some)]
"""Entries separated by commas."""


def parse_pairs(value: Any) -> Any:
    """'a=1,b=2' -> {'a': '1', 'b': '2'}; anything else is left for pydantic to judge."""
    if not isinstance(value, str):
        return value
    pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
    if not all(middle for _, middle, _ in pairs):
        raise ValueError("it must be PATTERN=KIND, several separated by commas")
    names = [name.strip() for name, _, _ in pairs]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{twice!r} is set twice")
    return {name.strip(): kind.strip() for name, _, kind in pairs}


def parse_object(value: Any) -> Any:
    """'{"a": 1}' -> {'a': 1}; anything else is left for pydantic to judge."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise ValueError('it must be a JSON object, such as {"key": 1}') from None


Object = Annotated[dict[str, Any], BeforeValidator(parse_object)]


def parse_prefix(value: Any) -> Any:
    """'/llm/' -> '/llm', and '' and '/' -> None; anything else is left for pydantic to judge."""
    if not isinstance(value, str):
        return value
    prefix = value.rstrip("/")
    if prefix and not PREFIX.fullmatch(prefix):
        raise ValueError("it must be a path of letters, digits and -._~, such as /llm")
    return prefix or None


PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)+", re.ASCII)
"""What a proxy may put before the routes: it gets into pages, so it may hold nothing that means something there."""


_STRICT = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SpeculativeConfig(BaseModel):
    """How tokens are drafted that a step tries ahead, in vLLM's words."""

    model_config = _STRICT

    method: Literal["ngram"] = "ngram"
    """ngram: what followed in the request's own text the last time that it said what it has just said."""
    num_speculative_tokens: Annotated[int, Field(ge=1, le=15)]
    """How many tokens are tried ahead."""
    prompt_lookup_min: Annotated[int, Field(ge=1, le=16)] | None = None
    """The shortest match that is good enough, in tokens; by default prompt_lookup_max."""
    prompt_lookup_max: Annotated[int, Field(ge=1, le=16)] | None = None
    """The longest match that is looked for, in tokens; by default prompt_lookup_min, and 5 without either."""

    @property
    def shortest(self) -> int:
        """The shortest match, in tokens."""
        return self.prompt_lookup_min or self.longest

    @property
    def longest(self) -> int:
        """The longest match, in tokens."""
        return self.prompt_lookup_max or self.prompt_lookup_min or 5

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(
                f"prompt_lookup_min is {self.shortest}: at most prompt_lookup_max, which is {self.longest}"
            )
        return self


class EngineConfig(BaseModel):
    """What the engine runs and how much of the machine it may use. None means: chosen at start, and printed."""

    model_config = _STRICT

    model: str = "smollm2-135m"
    """A built-in name (`jaxllm pull --list`), a directory, a .gguf file, or a Hugging Face hub id."""
    tokenizer: str | None = None
    """A directory or hub id to take the tokenizer from; by default the model's own."""
    revision: str | None = None
    """Branch, tag or commit of the hub repository."""
    download_dir: Path | None = None
    """Where downloaded models are kept (default ~/.cache/jaxllm/models; hub models stay in the hub's own cache)."""
    load_format: Literal["auto", "safetensors", "gguf", "orbax", "dummy"] = "auto"
    """`dummy` fills the right shapes with random weights on the device."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute and weight type; auto is bfloat16."""
    hf_overrides: Object | None = None
    """Other values for keys of config.json, as {"rope_parameters": {…}}; an object replaces those of its keys alone."""
    quantization: str | None = None
    """Refuse to start unless the checkpoint is quantized this way, as awq, gptq, fp8 or gguf; it changes nothing."""
    generation_config: str = "auto"
    """The folder of the generation_config.json that requests' defaults come from; auto: the model's, vllm: none."""
    override_generation_config: Object | None = None
    """Defaults of requests, as {"temperature": 0.5}; they win over generation_config."""
    max_logprobs: Annotated[int, Field(ge=-1, le=20)] = 20
    """Most log-probabilities a request may ask for at a token; -1: the whole vocabulary, as prompts may always have."""
    seed: int = 0
    """Where unseeded requests and dummy weights take their randomness from."""
    skip_tokenizer_init: bool = False
    """Work with token ids only."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Longest context, prompt plus generated; default the model's, shrunk to what KV memory holds."""

    dequantize: bool | None = None
    """Expand quantized weights to dtype at load; by default only where plain XLA runs on a CPU: faster there."""
    isq: Isq | None = None
    """Quantize weights while they are loaded (in situ); embedding and head take six bits or more."""
    isq_map: Annotated[dict[str, IsqOrNone], BeforeValidator(parse_pairs)] | None = None
    """Other kinds for tensors by their names in the checkpoint, as *.ffn_down.weight=q6k, *.attn_v.weight=none."""
    imatrix: Path | None = None
    """An importance matrix of llama.cpp's: it reduces the error of --isq in GGUF's kinds below 8 bits."""

    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most sequences in one step (default 32 on CPU, 256 elsewhere)."""
    max_num_batched_tokens: Annotated[int, Field(ge=16)] | None = None
    """Token budget of one step, prefill chunks and decodes together (default 512 on CPU, 2048 elsewhere)."""
    decode_steps: Annotated[int, Field(ge=1, le=8)] | None = None
    """Most tokens one dispatch decodes for a sequence while no request waits (default 4 with CPU kernels, else 1)."""
    speculative_config: Annotated[SpeculativeConfig, BeforeValidator(parse_object)] | None = None
    """Try tokens ahead, as {"method": "ngram", "num_speculative_tokens": 3}: the same answers in fewer steps."""
    decode_buckets: Sizes | None = None
    """Sequences that decodes are padded to, as 8,32: fewer sizes compile sooner (default: powers of two)."""
    prefill_buckets: Sizes | None = None
    """Tokens that prefills are padded to, as 64,512: fewer sizes compile sooner (default: powers of two)."""
    max_num_waiting: Annotated[int, Field(ge=0)] = 10_000
    """Longest waiting queue; a request beyond it is refused (HTTP 429)."""

    block_size: Literal[8, 16, 32, 64, 128] = 16
    """Tokens in one KV page."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of accelerator memory that weights, KV pages and workspace may take together."""
    kv_cache_memory: Annotated[Bytes, Field(gt=0)] | None = None
    """Bytes for KV pages and states, as 4GiB; 3% may stay unused (on CPU 2GiB, at most a quarter of what is free)."""
    state_cache_memory: Annotated[Bytes, Field(ge=0)] | None = None
    """Bytes of kv_cache_memory for states of cached prefixes, in models with recurrent layers (default an eighth)."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """How keys and values are kept in pages; int8 and fp8 have a scale for each token and head. auto is dtype."""
    enable_prefix_caching: bool = True
    """Reuse the KV pages of prompts that begin alike."""

    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """How many devices share each layer."""
    enable_expert_parallel: bool = False
    """Give each device whole experts of a mixture-of-experts model, instead of a part of every expert."""

    attention_backend: Literal["auto", "reference", "gpu", "tpu"] = "auto"
    """Which paged attention runs: plain XLA, or the Pallas kernels for NVIDIA GPUs or for TPUs."""
    cpu_kernels: Literal["auto", "off"] = "auto"
    """C++ kernels for bfloat16 on a CPU, from the wheel or compiled at the first start; off runs plain XLA."""
    enforce_eager: bool = False
    """Compile each bucket when it is first needed instead of ahead of time."""
    compile_cache_dir: Path | None = CACHE_DIR / "compile"
    """Compiled executables are kept here between starts; null turns the cache off."""
    executables: Path | None = None
    """A folder that `jaxllm compile` made for these settings: executables are loaded from it, and none compiled."""
    engine_process: bool | None = None
    """Run the engine loop in a process of its own (default: yes for serve, no in notebooks)."""


class ModelConfig(EngineConfig):
    """One served model: its engine, the names it goes by, its chat template, its parsers and its pooling."""

    served_model_name: SomeOf | None = None
    """Name clients use for the model (default: the model argument); several separated by commas, the first is shown."""
    chat_template: Path | None = None
    """A Jinja file that replaces the model's chat template."""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """Templates get a message's content as one string or as OpenAI's list of parts; auto reads it off the template."""
    default_chat_template_kwargs: Object | None = None
    """Variables of the chat template, as {"enable_thinking": false}; a request's chat_template_kwargs win."""
    tool_call_parser: str = "auto"
    """Format of tool calls: auto reads it off the chat template, none refuses tools; or a name, ours or vLLM's."""
    reasoning_parser: str = "auto"
    """Format of reasoning: auto reads it off the chat template, none leaves it in the content; or a name, as above."""
    pooling: Literal["auto", "last", "mean", "cls"] = "auto"
    """Which hidden states make an embedding; auto is what the checkpoint asks for, else the last token's."""
    score_method: Literal["auto", "yes_no", "cosine", "classifier"] = "auto"
    """How /score and /rerank compare: auto is Qwen3-Reranker's yes or no, a classification head, or cosine."""

    @property
    def names(self) -> list[str]:
        """What requests may call the model, and listings call it by the first."""
        return comma_separated(self.served_model_name) or [self.model]


class ServerConfig(BaseModel):
    """What belongs to the HTTP server, whatever models it serves."""

    model_config = _STRICT

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    uds: Path | None = None
    """A Unix domain socket to listen on, instead of host and port."""
    root_path: Annotated[str | None, BeforeValidator(parse_prefix)] = None
    """The path that a proxy puts before the routes, as /llm; X-Forwarded-Prefix says it by the request."""
    api_key: SomeOf | None = None
    """Clients must send it as a bearer token; several are separated by commas."""
    allowed_origins: str | None = None
    """Origins that may call from a browser (CORS), separated by commas; * for all."""
    allowed_hosts: str | None = None
    """Names the server may be called by, with commas, * for all; without it IP addresses, localhost, any with a key."""
    web: bool = True
    """Serve the page at /, where a person talks to the model in a browser; --no-web leaves it out."""
    max_body_size: Annotated[Bytes, Field(gt=0)] = 16 * 2**20
    """Largest request body, as 16MiB; larger ones get 413."""
    sse_keep_alive: Annotated[float, Field(gt=0)] = 15.0
    """Seconds of silence after which a stream sends a keep-alive comment."""
    shutdown_timeout: Annotated[float, Field(ge=0)] = 5.0
    """Seconds that running requests get to finish after Ctrl-C or SIGTERM."""

    @model_validator(mode="after")
    def _one_address(self) -> Self:
        given = sorted({"host", "port"} & self.model_fields_set)
        if self.uds is not None and given:
            raise ValueError(f"uds and {given[0]} exclude each other: the server listens on a file or on an address")
        return self

    serve_any_model_name: bool = False
    """Answer requests that ask for any other model too, by the name that they ask for."""
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    """What happens to request fields this server does not know: a 400, or a `warnings` member in the response."""
    enable_force_include_usage: bool = False
    """Send the usage at the end of every stream of chat and text completions, and what it is so far in every chunk."""

    models: Path | None = None
    """A YAML file of several models to serve, each with settings of its own: see docs/several-models.md."""
    model_directory: Path | None = None
    """A folder of models to serve: every .gguf file, and every folder with a config.json, under its own name."""
    max_loaded_models: Annotated[int, Field(ge=1)] = 1
    """How many of several models may be loaded at once; the one that was not used for longest makes room."""
    model_ttl: Annotated[float, Field(gt=0)] | None = None
    """Seconds without a request after which one of several models is unloaded (default: never)."""

    mcp_config: Path | None = None
    """A file of MCP tool servers to start with this one (default: none, also where ./mcp.json exists)."""
    mcp_inject: bool = True
    """Offer the MCP servers' tools to chats and responses that bring no tools of their own."""
    mcp_result_limit: Annotated[int, Field(ge=100)] = 20_000
    """Characters of an MCP tool's result that are passed on; what is beyond is cut."""
    mcp_max_turns: Annotated[int, Field(ge=1)] = 10
    """Most answers of the model in one chat whose MCP tools the server runs; the last may call none."""
    mcp_max_calls: Annotated[int, Field(ge=1)] = 32
    """Most MCP tools that the server runs in one chat or response."""
    allow_mcp_urls: bool = False
    """Let responses bring MCP servers of their own by server_url: https, at public addresses."""

    data_dir: Path = DATA_DIR
    """Where uploaded files, batches, stored responses and conversations are kept."""
    database_url: str | None = None
    """SQLAlchemy URL of the database of stored objects (default jaxllm.db in data_dir), as postgresql+asyncpg://…"""
    max_file_size: Annotated[Bytes, Field(gt=0)] = 512 * 2**20
    """Largest file that may be uploaded to /v1/files, as 512MiB; larger ones get 413."""
    max_batch_concurrency: Annotated[int, Field(ge=1)] | None = None
    """Sequences of batches that run at once (default seven eighths of max_num_seqs: the rest is for everyone else)."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged."""
    enable_request_logging: bool = False
    """Log one line a request."""
    vllm_metrics: bool = False
    """Export metrics under vLLM's names as well, so that its dashboards work."""


class ServeConfig(ServerConfig, ModelConfig):
    """A server and its model, side by side as flags, variables and flat YAML files give them."""

    @property
    def of_model(self) -> ModelConfig:
        """The model's part."""
        return part_of(self, ModelConfig)

    @property
    def of_server(self) -> ServerConfig:
        """The server's part."""
        return part_of(self, ServerConfig)


Part = TypeVar("Part", bound=BaseModel)


def part_of(config: BaseModel, schema: type[Part]) -> Part:
    """The fields of `schema`, one of the classes that the class of `config` is made of, which has checked them."""
    return schema.model_construct(**{name: getattr(config, name) for name in schema.model_fields})


def comma_separated(value: str | None) -> list[str]:
    """'a, b' -> ['a', 'b']"""
    return [part for item in (value or "").split(",") if (part := item.strip())]


SECTIONS = {
    "model": "Model", "dequantize": "Quantization", "max_num_seqs": "Scheduling", "block_size": "Memory",
    "tensor_parallel_size": "Parallelism", "attention_backend": "Execution", "host": "Server",
    "served_model_name": "API", "serve_any_model_name": "API", "models": "Several models",
    "mcp_config": "Tool servers", "data_dir": "Storage", "log_level": "Logging",
}  # fmt: skip
"""Field -> the section of --help and of docs/configuration.md that it and those after it are in; in their order."""


def sections(schema: type[BaseModel]) -> dict[str, list[str]]:
    """Section -> its fields, in order."""
    found: dict[str, list[str]] = {title: [] for title in SECTIONS.values()}
    title = ""
    for name in schema.model_fields:
        title = SECTIONS.get(name, title)
        found[title].append(name)
    return {title: names for title, names in found.items() if names}


def make_config(cls: type[EngineConfig], **fields: Any) -> Any:
    """Build `cls`, turning pydantic's report into one ConfigError line that names the first wrong field."""
    try:
        return cls(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "config"
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, cls.model_fields)}") from None
        if first["type"] == "missing":
            raise ConfigError(f"{name} is missing") from None
        raise ConfigError(f"{name} is {first['input']!r}: {first['msg'].lower()}") from None


def did_you_mean(name: str, known: Any) -> str:
    """'; did you mean …?' for the nearest known name, or nothing when none is near."""
    import difflib

    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
