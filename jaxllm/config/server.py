"""The settings of the HTTP server itself, whatever models it serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from jaxllm.config import values
from jaxllm.folders import user_folder
from jaxllm.logs import LogFormat

OTHER_KEY_VARIABLES = ("LLAMA_API_KEY", "VLLM_API_KEY")
"""Of llama.cpp and vLLM, honoured as JAXLLM_API_KEY: a server that has moved here must not answer without its key."""
FOR_SEVERAL_MODELS = ("preload_model", "max_loaded_models", "model_memory", "model_min_seconds", "model_ttl")
"""Settings that a server of one model refuses."""
SEVERAL_MODELS = ("models", "model_directory")
"""Settings of which either says that there are several models."""
DATA_DIR = user_folder("XDG_DATA_HOME", "~/.local/share")


class ServerConfig(values.SettingsGroup):
    """What belongs to the HTTP server, whatever models it serves."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one and prints it."""
    uds: Path | None = None
    """A Unix domain socket to listen on, instead of host and port."""
    root_path: values.PathPrefix = None
    """The path that a proxy puts before the routes, as /llm; X-Forwarded-Prefix says it by the request."""
    web: bool = True
    """Serve the page at /, where a person talks to the model in a browser; --no-web leaves it out."""
    max_body_size: Annotated[values.Bytes, Field(gt=0)] = 16 * 2**20
    """Largest request body, as 16MiB; larger ones get 413."""
    max_body_memory: Annotated[values.Bytes, Field(gt=0)] = 256 * 2**20
    """Memory for all bodies that are being read, as 256MiB, at least one's; beyond it the slowest gets 503."""
    send_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds after which a client that takes nothing of what it is sent is disconnected."""
    sse_keep_alive: Annotated[float, Field(gt=0)] = 15.0
    """Seconds of silence after which a stream sends a keep-alive comment."""
    stream_interval: Annotated[int, Field(ge=1, le=2**31 - 1)] = 1
    """Tokens to an event of a stream after the first, which comes by itself; more of them take less work."""
    lameduck: Annotated[float, Field(ge=0)] = 0.0
    """Seconds after Ctrl-C or SIGTERM in which /ready is 503, for load balancers, and requests are still answered."""
    shutdown_timeout: Annotated[float, Field(ge=0)] = 5.0
    """Seconds that running requests get to finish after Ctrl-C or SIGTERM, and after the lame-duck period."""

    api_key: values.SomeOf | None = None
    """Clients must send it as a bearer token; commas separate several. VLLM_API_KEY and LLAMA_API_KEY set it too."""
    api_key_file: Path | None = None
    """A YAML file of named keys, each with what it may do: see docs/keys.md. SIGHUP has it read again."""
    rate_limit_store: str | None = None
    """Where the keys' limits a minute are counted, as redis://HOST:PORT/0 (default: in this process, for it alone)."""
    audit_log: Path | None = None
    """A file that gets a line of JSON for each request: which key, from where, route, model, status, id; no text."""
    ssl_certfile: Path | None = None
    """Speak TLS with this certificate, followed by those that lead to a known one. SIGHUP has it read again."""
    ssl_keyfile: Path | None = None
    """The certificate's key (default: in the certificate's file)."""
    ssl_ca_certs: Path | None = None
    """Certificates that those of clients must lead to."""
    ssl_cert_reqs: Literal[0, 1, 2] = 0
    """Whether clients need a certificate of their own: 0 no, 1 it is checked where they send one, 2 yes."""
    allowed_origins: values.Origins | None = None
    """Origins that may call from a browser (CORS), separated by commas; * for all."""
    allowed_hosts: values.Entries | None = None
    """Names the server may be called by, with commas, * for all; without it IP addresses, localhost, any with a key."""

    @property
    def asks_for_key(self) -> bool:
        return self.api_key is not None or self.api_key_file is not None

    serve_any_model_name: bool = False
    """Answer requests that ask for any other model too, by the name that they ask for."""
    unknown_fields: Literal["refuse", "warn"] = "refuse"
    """What happens to request fields this server does not know: a 400, or a `warnings` member in the response."""
    enable_prompt_embeds: bool = False
    """Take prompts of vectors in text completions (prompt_embeds). They may say what no token says."""
    allowed_media_domains: values.Entries | None = None
    """Hosts from which images that requests name by a URL are fetched, at public addresses only (default: none)."""
    allowed_local_media_path: Path | None = None
    """A folder of this machine from which images that requests name by file:// are read (default: none)."""
    enable_force_include_usage: bool = False
    """Send the usage at the end of every stream of chat and text completions, and what it is so far in every chunk."""

    models: Path | None = None
    """A YAML file of several models to serve, each with settings of its own: see docs/several-models.md."""
    model_directory: Path | None = None
    """A folder of models to serve: every .gguf file, and every folder with a config.json, under its own name."""
    preload_model: values.SomeOf | None = None
    """Which of several models are loaded before the server is ready, by name or file, separated by commas."""
    max_loaded_models: Annotated[int, Field(ge=1)] | None = None
    """How many of several models may be loaded at once (default 1; with model_memory as many as fit into that)."""
    model_memory: Annotated[values.Bytes, Field(gt=0)] | None = None
    """Bytes that several models may take together, as 24GiB: of each GPU, or of the host where they run on the CPU."""
    model_min_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds after its load in which one of several models that is busy gives its place to no other."""
    model_ttl: Annotated[float, Field(gt=0)] | None = None
    """Seconds without a request after which one of several models is unloaded (default: never)."""

    @property
    def has_catalog(self) -> bool:
        """Whether several models may be asked for, each of which is loaded when it is."""
        return self.models is not None or self.model_directory is not None

    @property
    def most_loaded_models(self) -> int | None:
        """How many of several models may be loaded at once; None is any number."""
        return 1 if self.max_loaded_models is None and self.model_memory is None else self.max_loaded_models

    mcp_config: Path | None = None
    """A file of MCP tool servers to start with this one (default: none, also where ./mcp.json exists)."""
    mcp_inject: bool = False
    """Offer the MCP servers' tools to chats and responses that bring no tools of their own, without being asked."""
    mcp_result_limit: Annotated[int, Field(ge=100)] = 20_000
    """Characters of an MCP tool's result that are passed on; what is beyond is cut."""
    mcp_max_turns: Annotated[int, Field(ge=1)] = 10
    """Most answers of the model in one chat whose MCP tools the server runs; the last may call none."""
    mcp_max_calls: Annotated[int, Field(ge=1)] = 32
    """Most MCP tools that the server runs in one chat or response."""
    allow_mcp_urls: bool = False
    """Let responses bring MCP servers of their own by server_url: https, at public addresses."""

    data_dir: Path = DATA_DIR
    """Where uploaded files and running batches are kept, and the database if database_url names no other."""
    database_url: str | None = None
    """SQLAlchemy URL of the database of stored objects (default jaxllm.db in data_dir), as postgresql://…"""
    store_retention: Annotated[values.Seconds, Field(gt=0)] | None = None
    """Stored responses, conversations, files and ended batches are deleted after this time, as 30d (default: never)."""
    max_file_size: Annotated[values.Bytes, Field(gt=0)] = 512 * 2**20
    """Largest file that may be uploaded to /v1/files, as 512MiB; larger ones get 413."""
    max_batch_concurrency: Annotated[int, Field(ge=1)] | None = None
    """Sequences of batches that run at once (default seven eighths of max_num_seqs: the rest is for everyone else)."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged."""
    log_format: LogFormat = "text"
    """text is for people; json writes one JSON object a line, of the engines' processes too, and a line a request."""
    enable_request_logging: bool | None = None
    """Log one line a request: times and tokens, no prompt (default: yes with log_format json, else no)."""
    log_prompts: bool = False
    """Put prompts and answers into the request lines of log_format json, and into traces: they may hold secrets."""

    @property
    def sends_telemetry(self) -> bool:
        return self.otlp_traces_endpoint is not None or self.otlp_metrics_endpoint is not None

    @property
    def logs_requests(self) -> bool:
        return self.log_format == "json" if self.enable_request_logging is None else self.enable_request_logging

    def _faults(self) -> Iterator[str]:
        given = sorted({"host", "port"} & self.model_fields_set)
        if self.uds is not None and given:
            yield f"uds and {given[0]} exclude each other: the server listens on a file or on an address"
        lines = self.log_format == "json" and self.logs_requests
        if self.log_prompts and not (lines or self.otlp_traces_endpoint):
            yield (
                "log_prompts is true, but no request is logged as JSON (log_format, enable_request_logging), "
                "and no trace is sent (otlp_traces_endpoint)"
            )
        if "monitor_host" in self.model_fields_set and self.monitor_port is None:
            yield f"monitor_host is {self.monitor_host}, which changes nothing without monitor_port"
        yield from self._in_vain({
            "rate_limit_store": "api_key_file", "num_replicas": "ray", "prefix_affinity": "ray",
            "replica_options": "ray",
        })  # fmt: skip
        yield from super()._faults()

    monitor_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """A port of its own for metrics, probes and /debug/, which looks into the processes; 0 takes a free one."""
    monitor_host: str = "127.0.0.1"
    """Address of monitor_port, which asks for no key: whoever reaches it sees what the server does."""
    otlp_traces_endpoint: str | None = None
    """Send a trace of each request to this collector, by OTLP over HTTP, as http://localhost:4318/v1/traces."""
    otlp_metrics_endpoint: str | None = None
    """Send OpenTelemetry's metrics of requests there, once a minute, as http://localhost:4318/v1/metrics."""
    vllm_metrics: bool = False
    """Export metrics under vLLM's names as well, so that its dashboards work."""

    ray: bool = False
    """Run whole servers of the model as replicas on Ray Serve, with Ray's proxy at host and port: docs/scale.md."""
    num_replicas: Annotated[int | Literal["auto"] | None, values.or_auto(1)] = None
    """How many servers run side by side on Ray (default 1); auto: as many as there are requests for."""
    prefix_affinity: bool = False
    """Send a prompt to the replica on Ray that has had the same beginning, by Ray's PrefixCacheAffinityRouter."""
    replica_options: values.Object | None = None
    """Ray's options of the replicas' deployment, as {"ray_actor_options": {"num_gpus": 1}}."""
