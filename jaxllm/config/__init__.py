"""Every setting of engine and server: one typed tree that YAML, flags, JAXLLM_* variables and LLM(...) fill."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator

from jaxllm.config import values
from jaxllm.config.parts import ADAPTER_LISTS, KVEventsConfig, KVTransferConfig, LoRAModules, SpeculativeConfig
from jaxllm.config.server import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.folders import user_folder
from jaxllm.wording import did_you_mean, wrong_setting

CACHE_DIR = user_folder("XDG_CACHE_HOME", "~/.cache")

CPU_ISA_VARIABLE = "JAXLLM_CPU_ISA"
"""The environment variable that forces an instruction set of the C++ kernels. It is no setting of a deployment."""

ADAPTER_SIZES = ("max_loras", "max_lora_rank", "max_cpu_loras")

WITHOUT_STAGES: dict[str, Any] = {
    "speculative_config": None, "enable_lora": False, "decode_steps": 1, "kv_offload_memory": None,
}  # fmt: skip
"""What the layers of a model cannot be parted into stages with, and the value that it must have."""
WITHOUT_BATCHES: dict[str, Any] = {**WITHOUT_STAGES, "pipeline_parallel_size": 1}
"""The same for batches that run side by side."""


ByMedium = dict[Literal["image", "video", "audio"], Annotated[int, Field(ge=0)]]


class EngineConfig(values.SettingsGroup):
    """What the engine runs and how much of the machine it may use. None means: chosen at start, and printed."""

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
    dtype: values.Dtype = "auto"
    """Compute and weight type; auto is bfloat16. half, bf16, f32 and the like are read too."""
    hf_overrides: values.Object | None = None
    """Other values for keys of config.json, of GGUF files too, as {"rope_parameters": {…}}; objects key by key."""
    quantization: str | None = None
    """Refuse to start unless the checkpoint is quantized this way, as awq, gptq, fp8 or gguf; it changes nothing."""
    generation_config: str = "auto"
    """The folder of the generation_config.json that requests' defaults come from; auto: the model's, vllm: none."""
    override_generation_config: values.Object | None = None
    """Defaults of requests, as {"temperature": 0.5}; they win over generation_config."""
    max_logprobs: Annotated[int, Field(ge=-1, le=20)] = 20
    """Most log-probabilities a request may ask for at a token; -1: the whole vocabulary, as prompts may always have."""
    logprobs_mode: values.LogprobsMode = "raw_logprobs"
    """What log-probabilities of answers are of: the model's distribution, the one sampled from; or their logits."""
    seed: int = 0
    """Where unseeded requests and dummy weights take their randomness from."""
    skip_tokenizer_init: bool = False
    """Work with token ids only."""
    max_model_len: Annotated[Annotated[int, Field(ge=1)] | None, values.FromCount] = None
    """Longest context, prompt plus generated, as 32768 or 128k; default the model's, or what KV memory holds."""

    dequantize: bool | None = None
    """Expand quantized weights to dtype at load; by default only where plain XLA runs on a CPU: faster there."""
    isq: values.Isq | None = None
    """Quantize weights while they are loaded (in situ); embedding and head take six bits or more."""
    isq_map: values.IsqMap | None = None
    """Other kinds for tensors by their names in the checkpoint, as *.ffn_down.weight=q6k, *.attn_v.weight=none."""
    imatrix: Path | None = None
    """An importance matrix of llama.cpp's: it reduces the error of --isq in GGUF's kinds below 8 bits."""

    max_num_seqs: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Most sequences in one step (default 32 on CPU, 256 elsewhere)."""
    max_num_batched_tokens: Annotated[Annotated[int, Field(ge=16)] | None, values.FromCount] = None
    """Token budget of one step, prefill chunks and decodes together (default 512 on CPU, 2048 elsewhere)."""
    decode_steps: Annotated[int, Field(ge=1, le=8)] | None = None
    """Most tokens one dispatch decodes for each sequence while no other could begin (default 4 with CPU kernels)."""
    speculative_config: Annotated[SpeculativeConfig, values.FromJSON] | None = None
    """Try tokens ahead, as {"method": "ngram", "num_speculative_tokens": 3}: the same answers in fewer steps."""
    decode_buckets: values.Sizes | None = None
    """Sequences that decodes are padded to, as 8,32: fewer sizes compile sooner (default: powers of two)."""
    prefill_buckets: values.Sizes | None = None
    """Tokens that prefills are padded to, as 64,512: fewer sizes compile sooner (default: powers of two)."""
    enable_lora: bool = False
    """Let requests use adapters (LoRA): see docs/lora.md."""
    max_loras: Annotated[int, Field(ge=1, le=256)] = 8
    """How many adapters one step may use, which are on the devices together; others wait for their place."""
    max_lora_rank: Annotated[int, Field(ge=1, le=512)] = 16
    """The greatest rank that an adapter may have; it sizes the adapters' places on the devices."""
    max_cpu_loras: Annotated[int, Field(ge=1)] | None = None
    """How many adapters are kept in host memory, to be on the devices again at once (default four times max_loras)."""
    max_num_waiting: Annotated[int, Field(ge=0)] = 10_000
    """Longest waiting queue; a request beyond it is refused (HTTP 429)."""

    block_size: Literal[8, 16, 32, 64, 128] = 16
    """Tokens in one KV page."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of accelerator memory that weights, KV pages and workspace may take together."""
    kv_cache_memory: Annotated[values.Bytes, Field(gt=0)] | None = None
    """Bytes for KV pages and states, as 4GiB; 3% may stay unused (on CPU 2GiB, at most a quarter of what is free)."""
    state_cache_memory: Annotated[values.Bytes, Field(ge=0)] | None = None
    """Bytes of kv_cache_memory for states of cached prefixes, in models with recurrent layers (default an eighth)."""
    media_cache_memory: Annotated[values.Bytes, Field(ge=0)] | None = None
    """Bytes on the devices for rows of images, as 256MiB (default: those of a whole context); 0: images are refused."""
    image_min_tokens: Annotated[int, Field(ge=1)] | None = None
    """Least tokens of an image, where the model's images have different sizes; small ones are enlarged."""
    image_max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of an image, where the model's images have different sizes; larger ones are made smaller."""
    limit_mm_per_prompt: Annotated[ByMedium | None, values.FromJSON] = None
    """Most images of a request, as {"image": 4}; videos and sounds are refused anyway."""
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = "auto"
    """How keys and values are kept in pages; int8 and fp8 have a scale for each token and head. auto is dtype."""
    enable_prefix_caching: bool = True
    """Reuse the KV pages of prompts that begin alike."""
    kv_offload_memory: Annotated[values.Bytes, Field(gt=0)] | None = None
    """Bytes of host memory, as 8GiB, for KV pages and states that have lost their place: prompts find them there."""
    kv_offload_dir: Path | None = None
    """A folder for what kv_offload_memory has no room for, and for all that an idle engine has: it outlives it."""
    kv_offload_disk: Annotated[values.Bytes, Field(gt=0)] = 16 * 2**30
    """Bytes that kv_offload_dir may take for one model; what was unused longest is deleted."""
    kv_transfer_config: Annotated[KVTransferConfig, values.FromJSON] | None = None
    """Compute prompts for other servers, or go on with theirs, as {"kv_role": "kv_both"}: see docs/scale.md."""
    kv_events_config: Annotated[KVEventsConfig, values.FromJSON] | None = None
    """Tell routers over ZeroMQ which prompts are cached, as {"topic": "kv@10.0.0.5:8000@qwen3"}."""

    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """How many devices share each layer."""
    pipeline_parallel_size: Annotated[int, Field(ge=1)] = 1
    """How many stages the layers are parted into, each on devices of its own: see docs/scale.md."""
    multi_process: bool = False
    """Give each of these devices a process of its own, on one machine; by default one process has all of them."""
    data_parallel_size: Annotated[int, Field(ge=1)] = 1
    """How many engines of the model answer side by side, each in a process with devices or cores of its own."""
    enable_dp_attention: bool = False
    """Run data_parallel_size batches in one engine instead, each on devices of its own, which can share the experts."""
    enable_expert_parallel: bool = False
    """Give each device whole experts of a mixture-of-experts model, instead of a part of every expert."""
    num_experts_offload_per_rank: Annotated[int, Field(ge=0)] = 0
    """How many of each device's experts of a layer are left in host memory: the last ones. See docs/memory.md."""
    num_experts_cached_per_rank: Annotated[int, Field(ge=1)] | None = None
    """How many of those have a place on the device at once (default a quarter, but at least what a token uses)."""
    num_processes: Annotated[int, Field(ge=1)] | None = None
    """How many processes, on one machine or several, run the model together: see docs/scale.md."""
    process_id: Annotated[int, Field(ge=0)] | None = None
    """Which of them this is: 0 answers requests, and the others follow it."""
    coordinator_address: str | None = None
    """Where the others reach process 0, as 10.0.0.1:8476."""
    cluster: Literal["auto", "slurm", "ompi", "mpi4py", "k8s", "lws", "off"] = "auto"
    """What says these three where they are not set; auto: serve takes them from Slurm, Open MPI or LeaderWorkerSet."""
    cluster_secret: str | None = None
    """What processes, and servers that exchange KV pages, know each other by (default: a file only you can read)."""

    threads: Annotated[int, Field(ge=1)] | None = None
    """Threads that compute on a CPU, for all engines of the model (default: one a physical core that it may use)."""
    numa_node: Annotated[int | Literal["auto"] | None, values.or_auto(0)] = None
    """On a CPU, keep each engine to the cores and memory of this NUMA node; auto: several engines take them in turn."""

    attention_backend: Literal["auto", "reference", "gpu", "tpu"] = "auto"
    """Which paged attention runs: plain XLA, or the Pallas kernels for NVIDIA GPUs or for TPUs."""
    cpu_kernels: Literal["auto", "off"] = "auto"
    """C++ kernels for bfloat16 on a CPU, from the wheel or compiled at the first start; off runs plain XLA."""
    cpu_products: Literal["int8", "bf16"] = "int8"
    """The type to which those kernels round the inputs of quantized weights; bf16 rounds the weights, too."""
    enforce_eager: bool = False
    """Compile each bucket when it is first needed instead of ahead of time."""
    compile_cache_dir: Path | None = CACHE_DIR / "compile"
    """Compiled executables are kept here between starts; null turns the cache off."""
    compile_cache_max: Annotated[values.Bytes, Field(gt=0)] = 8 * 2**30
    """Bytes that compile_cache_dir may take, as 4GiB; after each start, what was unused longest is deleted."""
    weight_cache_max: Annotated[values.Bytes, Field(ge=0)] = 32 * 2**30
    """Bytes that packed weights may take in compile_cache_dir; the next start on a CPU maps them. 0 keeps none."""
    executables: Path | None = None
    """A folder that `jaxllm compile` made for these settings: executables are loaded from it, and none compiled."""
    engine_process: bool | None = None
    """Run the engine loop in a process of its own (default: yes for serve, no in notebooks)."""

    @property
    def may_use_adapters(self) -> bool:
        return self.enable_lora

    def _faults(self) -> Iterator[str]:
        for name in ADAPTER_SIZES:
            if not self._is_default(name) and not self.may_use_adapters:
                yield f"{name} is {getattr(self, name)}, and enable_lora is false: no request could use an adapter"
        yield from self._in_vain({
            "num_experts_cached_per_rank": "num_experts_offload_per_rank", "kv_offload_dir": "kv_offload_memory",
            "kv_offload_disk": "kv_offload_dir",
        })  # fmt: skip
        if self.kv_offload_memory is not None and not self.enable_prefix_caching:
            yield "kv_offload_memory is set, and enable_prefix_caching is false: nobody would look there"
        for name, several in (("num_processes", self.in_group), ("multi_process", self.multi_process)):
            if self.kv_offload_memory is not None and several:
                yield f"kv_offload_memory is set, and {name}: each process would have to keep its part"
        yield from self._faults_of_processes()
        if self.pipeline_parallel_size > 1:
            yield from self._unfit(
                WITHOUT_STAGES, f"pipeline_parallel_size is {self.pipeline_parallel_size}: stages do not go with it yet"
            )
        if self.enable_dp_attention and self.data_parallel_size == 1:
            yield (
                "enable_dp_attention is true, and data_parallel_size is 1, so that there would be one batch: accepted "
                "are 2 or more"
            )
        if self.enable_dp_attention:
            yield from self._unfit(
                WITHOUT_BATCHES, "enable_dp_attention is true: batches side by side do not go with it yet"
            )
        if self.kv_events_config is not None and not self.enable_prefix_caching:
            yield "kv_events_config is set, and enable_prefix_caching is false: there is nothing to tell"
        if self.kv_transfer_config is not None and self.kv_offload_memory is None:
            yield (
                "kv_transfer_config is set, and kv_offload_memory is not: pages wait in host memory, of which it says "
                "how much they may take, as 4GiB"
            )
        if self.kv_transfer_config is not None and self.kv_transfer_config.gives and self.num_engines > 1:
            yield (
                f"kv_transfer_config has kv_role {self.kv_transfer_config.kv_role}, and data_parallel_size is "
                f"{self.data_parallel_size}: one engine listens at a port; accepted are kv_consumer, or 1"
            )
        yield from super()._faults()

    def _faults_of_processes(self) -> Iterator[str]:
        if self.multi_process:
            if self.num_devices == 1:
                yield (
                    "multi_process is true, and tensor_parallel_size is 1, so that there would be one process: "
                    "accepted are 2 or more, or a pipeline_parallel_size of 2 or more"
                )
            for name in ("num_processes", "process_id", "coordinator_address"):
                if getattr(self, name) is not None:
                    yield f"{name} is {getattr(self, name)}, and multi_process is true, which sets it by itself"
            if self.cluster not in ("auto", "off"):
                yield f"cluster is {self.cluster}, and multi_process is true: it starts the processes itself"
            if self.num_engines > 1:
                stated = f"data_parallel_size is {self.data_parallel_size}"
                yield f"{stated}, and multi_process is true: it is for one engine"
            if self.engine_process is False:
                yield "engine_process is false, and multi_process is true: process 0 is the engine's own"
        parts = self.num_devices if self.multi_process else self.num_engines
        if self.threads is not None and self.threads < parts:
            yield f"threads is {self.threads}, which {parts} processes would share; accepted are {parts} or more"
        if self.numa_node is not None:
            if self.multi_process or self.in_group:
                stated = "multi_process is true" if self.multi_process else f"num_processes is {self.num_processes}"
                yield f"numa_node is {self.numa_node}, and {stated}: it is for engines of one process"
            if self.engine_process is False:
                yield f"numa_node is {self.numa_node}, and engine_process is false: a process keeps to a node"

    def _unfit(self, accepted_values: Mapping[str, Any], stated: str) -> Iterator[str]:
        for name, accepted in accepted_values.items():
            value = getattr(self, name)
            if value is not None and value is not False and value != accepted:
                shown = f"is {value}" if isinstance(value, int) else "is set"
                rule = "leave it out" if accepted is None else f"accepted is {accepted}"
                yield f"{name} {shown}, and {stated}; {rule}"

    @property
    def num_devices(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.num_batches

    @property
    def num_batches(self) -> int:
        return self.data_parallel_size if self.enable_dp_attention else 1

    @property
    def num_engines(self) -> int:
        return 1 if self.enable_dp_attention else self.data_parallel_size

    @property
    def in_group(self) -> bool:
        return (self.num_processes or 1) > 1


class ModelConfig(EngineConfig):
    """One served model: its engine, the names it goes by, its adapters, its chat template, its parsers, its pooling."""

    served_model_name: values.SomeOf | None = None
    """Names for clients, separated by commas; the first is shown, claude-* is any that begins so (default: model)."""
    lora_modules: LoRAModules | None = None
    """Adapters (LoRA) to serve beside the model, as name=path,other=path, or JSON objects; it sets enable_lora."""
    chat_template: Path | None = None
    """A Jinja file that replaces the model's chat template."""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """Templates get a message's content as one string or as OpenAI's list of parts; auto reads it off the template."""
    default_chat_template_kwargs: values.Object | None = None
    """Variables of the chat template, as {"enable_thinking": false}; a request's chat_template_kwargs win."""
    tool_call_parser: str = "auto"
    """Format of tool calls: auto reads it off the chat template, none refuses tools; or a name, ours or vLLM's."""
    reasoning_parser: str = "auto"
    """Format of reasoning: auto reads it off the chat template, none leaves it in the content; or a name, as above."""
    pooling: Literal["auto", "last", "mean", "cls"] = "auto"
    """Which hidden states make an embedding; auto is what the checkpoint asks for, else the last token's."""
    score_method: Literal["auto", "yes_no", "cosine", "classifier"] = "auto"
    """How /score and /rerank compare: auto is Qwen3-Reranker's yes or no, a classification head, or cosine."""

    @model_validator(mode="before")
    @classmethod
    def _adapters_enable_lora(cls, given: Any) -> Any:
        if isinstance(given, dict) and "enable_lora" not in given and any(map(given.get, ADAPTER_LISTS)):
            return given | {"enable_lora": True}
        return given

    def _faults(self) -> Iterator[str]:
        for name in ADAPTER_LISTS:
            if getattr(self, name, None) and not self.enable_lora:
                yield f"{name} is set, and enable_lora is false: adapters need it"
        for name in self.name_patterns:
            if name.count("*") > 1:
                yield f"served_model_name has {name!r}; a name may have one *"
        yield from super()._faults()

    @property
    def names(self) -> list[str]:
        """What requests may call the model, and listings call it by the first."""
        given = values.comma_separated(self.served_model_name)
        return [name for name in given if not values.is_pattern(name)] or [self.model]

    @property
    def name_patterns(self) -> list[str]:
        """Requests may also call it by any name that one of these stands for."""
        return [name for name in values.comma_separated(self.served_model_name) if values.is_pattern(name)]


class ServeConfig(ServerConfig, ModelConfig):
    """A server and its model, side by side as flags, variables and flat YAML files give them."""

    @property
    def may_use_adapters(self) -> bool:
        """With several models any of them may, by its own settings."""
        return self.enable_lora or self.models is not None or self.model_directory is not None

    @property
    def of_model(self) -> ModelConfig:
        return part_of(self, ModelConfig)

    @property
    def of_server(self) -> ServerConfig:
        return part_of(self, ServerConfig)


Part = TypeVar("Part", bound=BaseModel)


def part_of(config: BaseModel, schema: type[Part]) -> Part:
    """The fields of `schema`, one of the classes that the class of `config` is made of, which has checked them."""
    return schema.model_construct(**{name: getattr(config, name) for name in schema.model_fields})


def make_config(cls: type[EngineConfig], **fields: Any) -> Any:
    """Build `cls`, turning pydantic's report into one ConfigError line that names the first wrong field."""
    try:
        return cls(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if not name:  # a rule about several fields at once
            raise ConfigError(wrong_setting(first)) from None
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"unknown setting {name!r}{did_you_mean(name, cls.model_fields)}") from None
        if first["type"] == "missing":
            raise ConfigError(f"{name} is missing") from None
        raise ConfigError(f"{name} is {first['input']!r}: {wrong_setting(first)}") from None
