"""What fits: weights, KV pages, buckets. Computed before anything touches device memory, and printed at start."""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil

from jaxllm import compat, cpu_kernels
from jaxllm.config import EngineConfig, format_bytes
from jaxllm.engine.device.buckets import Buckets
from jaxllm.engine.device.step import StepSizes
from jaxllm.errors import ConfigError
from jaxllm.models.abstract import abstract_model
from jaxllm.models.options import BuildOptions
from jaxllm.models.parallel import check_parallel
from jaxllm.models.registry import ModelSpec, model_spec
from jaxllm.pallas_kernels import Kernels, choose_kernels
from jaxllm.pallas_kernels.pages import SCALE_BYTES, PageUse
from jaxllm.pallas_kernels.tpu_limits import most_sequences
from jaxllm.quantization.gguf_encode import IMPORTANCE
from jaxllm.quantization.schemes import BLOCKS
from jaxllm.sharding.devices import find_devices
from jaxllm.weights import open_checkpoint
from jaxllm.weights.checkpoint import Checkpoint
from jaxllm.weights.kinds import KindChooser
from jaxllm.weights.loader import ParamSpec
from jaxllm.weights.saved import SavedCheckpoint
from jaxllm.weights.source import resolve_model

logger = logging.getLogger(__name__)

CPU_KV_BYTES = 2 * 2**30
NATIVE_DECODE_STEPS = 4
"""With the C++ kernels a small model's step takes a few milliseconds, on cores that the host needs as well."""
PAGE_COUNT_BITS = 6
"""A number of pages has so many significant bits: at most 1/32 of the memory is left out for it."""
DTYPES = {"auto": jnp.bfloat16, "bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}


@dataclass(frozen=True)
class Platform:
    """The machine as far as planning goes; bytes are a device's."""

    name: str
    num_devices: int
    memory_limit: int | None
    """What one device lets this process use; None on CPU, where free memory of the host decides."""
    free_host_memory: int
    memory: int | None = None
    """What one device has, of which gpu_memory_utilization is a share; None: as much as `memory_limit`."""
    device: str = ""
    """What its maker calls it."""

    @classmethod
    def current(cls, utilization: float) -> Platform:
        """JAX's platform in this process, of whose memory an accelerator's share is asked for if it has not started."""
        compat.share_device_memory(utilization)
        return cls.of(find_devices()[0])

    @classmethod
    def of(cls, device: jax.Device) -> Platform:
        """The machine that a mesh's device is one of."""
        memory = compat.device_memory(device)
        limit, total = memory or (None, None)
        host = psutil.virtual_memory().available
        return cls(device.platform, device.client.device_count(), limit, host, total, device.device_kind)


@dataclass(frozen=True)
class EnginePlan:
    """Sizes an engine settles on; bytes and counts are per device where devices share the work."""

    model: str
    family: str
    platform: str
    dtype: str
    attention_backend: str
    tensor_parallel_size: int
    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    num_pages: int
    page_size: int
    workspace_bytes: int
    max_model_len: int
    model_max_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    decode_steps: int
    buckets: Buckets
    notes: list[str] = field(default_factory=list)
    """What had to be changed to fit, one sentence each."""
    device: str = ""
    """What the devices are called."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pages hold together."""
        return (self.num_pages - 1) * self.page_size

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_size * self.kv_bytes_per_token

    @property
    def planned_bytes(self) -> int:
        """What the plan takes of a device."""
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def num_shapes(self) -> int:
        """Padded shapes to compile, each kind counted once."""
        return len(self.buckets.decode) + len(self.buckets.prefill) + len(self.buckets.head)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, for `jaxllm plan --json`."""
        derived = {"kv_tokens": self.kv_tokens, "kv_bytes": self.kv_bytes, "num_shapes": self.num_shapes}
        return asdict(self) | derived

    def summary(self) -> str:
        """Two lines for the log."""
        many = self.kv_tokens / self.max_model_len
        return (
            f"{self.family} {self.num_parameters / 1e6:,.0f}M parameters, {self.dtype}, "
            f"{format_bytes(self.weight_bytes)} of weights a device on {self.tensor_parallel_size} {self.platform} "
            f"device(s), attention: {self.attention_backend}\n"
            f"KV cache {format_bytes(self.kv_bytes)} a device: {self.num_pages - 1:,} pages of {self.page_size}, "
            f"{self.kv_tokens:,} tokens, {many:.1f} sequences of {self.max_model_len:,} tokens; "
            f"up to {self.max_num_seqs} sequences and {self.max_num_batched_tokens} tokens a step"
        )


@dataclass(frozen=True)
class Blueprint:
    """A plan with what building from it needs."""

    plan: EnginePlan
    spec: ModelSpec
    options: BuildOptions
    model: Any
    params: list[ParamSpec]
    sizes: StepSizes


def plan_engine(config: EngineConfig, platform: Platform | None = None) -> EnginePlan:
    """The plan for `config` on this machine (or on `platform`); reads the checkpoint's header, allocates nothing.

    Raises:
        ConfigError, ModelNotFoundError, CheckpointError: as `LLM` would.
    """
    path = resolve_model(config.model, revision=config.revision, download_dir=config.download_dir)
    checkpoint = open_checkpoint(path, config.load_format)
    try:
        return make_blueprint(config, checkpoint, platform or Platform.current(config.gpu_memory_utilization)).plan
    finally:
        checkpoint.close()


def keeps_packed(config: EngineConfig, checkpoint: Checkpoint, kernels: Kernels, platform: Platform) -> bool:
    """Whether blocks of a quantized checkpoint stay as they are in memory, or are expanded to the model's type.

    Plain XLA on a CPU decodes four times faster from expanded weights; everywhere else packed ones are the better deal.
    """
    if config.dequantize is None and (config.isq or config.isq_map):
        return True  # whoever asks for another kind must say that these are to be expanded first
    if config.dequantize is None and isinstance(checkpoint, SavedCheckpoint) and checkpoint.is_requantized:
        return True  # as with the flags that it was converted with
    return not config.dequantize if config.dequantize is not None else kernels.native or platform.name != "cpu"


def make_blueprint(config: EngineConfig, checkpoint: Checkpoint, platform: Platform) -> Blueprint:
    """Choose every size.

    Raises:
        ConfigError: tensor parallelism does not divide the model, or not even one sequence fits.
        CheckpointError: as `model_spec`; a tensor is missing, or a shard would part a block of a quantized one.
    """
    check_imatrix(config)
    spec = model_spec(checkpoint)
    model_config, tp = spec.config, config.tensor_parallel_size
    check_parallel(model_config, tp, config.enable_expert_parallel)
    dtype = DTYPES[config.dtype]
    on_cpu = platform.memory_limit is None
    wanted = config.max_model_len or model_config.max_position_embeddings
    page, page_heads = config.block_size, max(model_config.page_heads, tp)
    pages_per_seq = math.ceil(wanted / page)
    max_num_seqs = config.max_num_seqs or _default_num_seqs(platform, pages_per_seq)
    kernels = choose_kernels(
        config.attention_backend,
        platform.name,
        kv_cache_dtype=config.kv_cache_dtype,
        dtype=dtype,
        native=platform.name == "cpu" and _runs_cpu_kernels(config, dtype),
        use=PageUse(page_heads // tp, model_config.page_dims, max_num_seqs, pages_per_seq),
    )
    options = BuildOptions(dtype, tp, kernels, config.enable_expert_parallel)
    kinds = KindChooser(
        checkpoint,
        spec.names,
        tp,
        keeps_packed(config, checkpoint, kernels, platform),
        config.isq,
        config.isq_map or {},
        tiles=kernels.native,
    )
    model, params = abstract_model(spec, options, kinds)

    batched = config.max_num_batched_tokens or (512 if on_cpu else 2048)
    buckets = Buckets.build(
        max_num_seqs,
        batched,
        smallest_rows=kernels.smallest_rows,
        decode=config.decode_buckets,
        prefill=config.prefill_buckets,
    )
    decode_steps = config.decode_steps or (NATIVE_DECODE_STEPS if kernels.native else 1)
    notes = kinds.notes
    if wanted > model_config.max_position_embeddings:
        raise ConfigError(
            f"max_model_len is {wanted}; this model's positions end at {model_config.max_position_embeddings}"
        )
    leaves = [leaf for param in params for leaf in param.leaves()]
    weight_bytes = sum(a.size * a.dtype.itemsize // (tp if any(axes) else 1) for a, axes in leaves)
    page_dtype = kernels.page_dtype(dtype)
    scales = SCALE_BYTES if config.kv_cache_dtype != "auto" else 0
    page_dims = tuple(dim + scales for dim in model_config.page_dims)
    itemsize = np.dtype(dtype).itemsize
    rows = kernels.page_layout.shapes(1, 1, page_heads // tp, page_dims)
    token_bytes = model_config.num_layers * sum(map(math.prod, rows)) * page_dtype.itemsize
    workspace = _workspace_bytes(spec, max_num_seqs, batched, tp, itemsize)
    budget = _kv_budget(config, platform, weight_bytes, workspace)
    num_pages = _page_count(budget // (page * token_bytes), pages_per_seq, max_num_seqs)
    capacity = (num_pages - 1) * page
    if capacity < page:
        raise ConfigError(
            f"KV memory of {format_bytes(max(budget, 0))} a device holds no page of {page} tokens "
            f"({format_bytes(page * token_bytes)}) besides the weights ({format_bytes(weight_bytes)}); "
            "raise kv_cache_memory or gpu_memory_utilization, or lower max_num_batched_tokens"
        )
    max_model_len = min(wanted, capacity)
    if max_model_len < wanted:
        notes.append(
            f"max_model_len shrunk from {wanted} to {max_model_len}: KV memory of {format_bytes(budget)} "
            f"holds no longer context"
        )
    sizes = StepSizes(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        decode_steps=decode_steps,
        max_model_len=max_model_len,
        page_size=page,
        num_pages=num_pages,
        num_layers=model_config.num_layers,
        page_heads=page_heads,
        page_dims=page_dims,
        vocab_size=spec.config.num_outputs,
        hidden_size=model_config.hidden_size,
        dtype=dtype,
        page_dtype=page_dtype,
        page_layout=kernels.page_layout,
    )
    plan = EnginePlan(
        model=config.model,
        family=spec.family.name,
        platform=platform.name,
        dtype=np.dtype(dtype).name,
        attention_backend=kernels.name,
        tensor_parallel_size=tp,
        num_parameters=count_parameters(spec, params if tp == 1 else None),
        weight_bytes=weight_bytes,
        kv_bytes_per_token=token_bytes,
        num_pages=num_pages,
        page_size=page,
        workspace_bytes=workspace,
        max_model_len=max_model_len,
        model_max_len=model_config.max_position_embeddings,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched,
        decode_steps=decode_steps,
        buckets=buckets,
        notes=notes,
        device=platform.device,
    )
    return Blueprint(plan, spec, options, model, params, sizes)


def check_imatrix(config: EngineConfig) -> None:
    """Raises ConfigError where an importance matrix would be ignored."""
    if config.imatrix is None:
        return
    asked = {config.isq, *(config.isq_map or {}).values()} - {None}
    weighed = [name for name, kind in BLOCKS.items() if kind.type in IMPORTANCE]
    if config.load_format == "dummy" or not asked & set(weighed):
        what = (
            "weights are random" if config.load_format == "dummy" else "no weight is quantized to a kind it counts for"
        )
        raise ConfigError(
            f"imatrix is {str(config.imatrix)!r}, but {what}; accepted with isq or isq_map of {', '.join(weighed)}"
        )


def _runs_cpu_kernels(config: EngineConfig, dtype: Any) -> bool:
    """Whether the C++ kernels are wanted, and could be compiled; the log says what prevents them.

    They serve bfloat16. float32 is for those who want nothing rounded and tokens that no batch-mate can change in their
    last bit: plain XLA gives that.
    """
    if config.cpu_kernels == "off" or config.attention_backend != "auto" or np.dtype(dtype) != jnp.bfloat16:
        return False
    if not cpu_kernels.available():
        logger.warning("%s; plain XLA runs, at a fraction of the speed", cpu_kernels.reason())
        return False
    return True


def _default_num_seqs(platform: Platform, pages_per_seq: int) -> int:
    """As many as a device keeps busy with, and as the page table of a TPU's attention has room for."""
    if platform.memory_limit is None:
        return 32
    return min(256, most_sequences(pages_per_seq) or 256) if platform.name == "tpu" else 256


def _page_count(fit: int, a_sequence: int, max_num_seqs: int) -> int:
    """Pages to make where `fit` fit and a sequence at full length takes `a_sequence`; page 0 is nobody's.

    The count is a shape of every compiled step, so memory that differs by little makes the same count: it is rounded
    down to PAGE_COUNT_BITS, but not below one full sequence. More than all sequences can use would never be touched.
    Worked example: 4,000 and 4,030 that fit (111110100000b, 111110111110b) both make 3,968 (111110000000b).
    """
    low_bits = max(fit.bit_length() - PAGE_COUNT_BITS, 0)
    rounded = fit >> low_bits << low_bits
    most, one = max_num_seqs * a_sequence + 1, a_sequence + 1
    if fit >= most:
        return most
    return max(rounded, one) if fit >= one else rounded


def count_parameters(spec: ModelSpec, params: list[ParamSpec] | None = None) -> int:
    """Parameters as published: without padding or replication. `params` saves work where they are of one device."""
    if params is None:
        _, params = abstract_model(spec, BuildOptions())
    padding = (p for p in params if p.layout is not None and p.layout.pad_to)
    extra = sum((p.shape[0] - p.layout.segments[0].rows) * math.prod(p.shape[1:]) for p in padding if p.layout)
    return sum(math.prod(p.shape) for p in params) - extra


def _workspace_bytes(spec: ModelSpec, max_num_seqs: int, tokens: int, tp: int, itemsize: int) -> int:
    """An upper estimate of a step's temporaries: one layer's activations and the sampler's rows of logits."""
    c = spec.config
    heads = c.num_heads // tp * (c.page_dims[0] + c.head_dim) + 2 * max(c.page_heads, tp) // tp * c.page_dims[0]
    # A token has a row for each expert that it uses.
    width = max(c.intermediate_size, c.moe.top_k * (c.hidden_size + c.moe.hidden) + c.moe.shared_hidden if c.moe else 0)
    layer = tokens * (4 * c.hidden_size + 3 * width // tp + 2 * heads) * 4
    logits = max(max_num_seqs, 2) * c.vocab_size * 4 * 4
    return layer + logits + tokens * c.hidden_size * itemsize


def _kv_budget(config: EngineConfig, platform: Platform, weight_bytes: int, workspace: int) -> int:
    if config.kv_cache_memory is not None:
        return config.kv_cache_memory
    if platform.memory_limit is None:
        return min(CPU_KV_BYTES, (platform.free_host_memory - weight_bytes) // 4)
    wanted = int((platform.memory or platform.memory_limit) * config.gpu_memory_utilization)
    return min(wanted, platform.memory_limit) - weight_bytes - workspace
