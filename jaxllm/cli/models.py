"""Commands about models: which there are, fetching, showing, planning, compiling, converting or removing one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from cyclopts import Parameter

from jaxllm.cli.settings import Json, Switch, documented, takes_settings
from jaxllm.cli.terminal import agrees, print_found, print_table
from jaxllm.config import EngineConfig
from jaxllm.config.values import Isq, format_bytes, parse_bytes
from jaxllm.errors import ConfigError, DoesNotFitError, reason
from jaxllm.folders import in_home

if TYPE_CHECKING:
    from jaxllm.engine.start.plan import EnginePlan

FIELDS = ("name", "models", "architectures", "model_types", "layer_types", "gguf_architectures")
"""What a family says about itself; its other fields are functions."""


@documented
def models(
    *,
    check: Path | None = None,
    server: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="JAXLLM_API_KEY")] = None,
    json_output: Json = False,
) -> None:
    """List the model families: what they serve, their Hugging Face classes, and the formats they load from.

    With --check say of one model whether it is served; the exit code is 1 where it is not. With --server list the
    models of a running server, and whether each is loaded.

    Args:
        check: A config.json, a folder that holds one, or a GGUF file. What the model needs and no family has is named,
            with the family that is nearest; weights are not read.
        server: The address of a running server, as http://127.0.0.1:8000.
        api_key: The key that the server asks for.
        json_output: Print a JSON array instead of a table.
    """
    if check is not None and server is not None:
        raise ConfigError(f"--check is {str(check)!r} and --server is {server!r}; accepted is one of them")
    if check is not None:
        _check(check, json_output)
    elif server is not None:
        asyncio.run(_list_served(server, api_key, json_output))
    else:
        _list_families(json_output)


def _check(path: Path, json_output: bool) -> None:
    from jaxllm.models.verdict import verdict

    found = verdict(in_home(path))
    if json_output:
        print(json.dumps(found._asdict() | {"path": str(path), "family": found.family.name}))
    else:
        print(f"{path}: {found}")
    if not found.served:
        raise SystemExit(1)


def _list_families(json_output: bool) -> None:
    from jaxllm.models.registry import FAMILIES

    rows = [
        (family.name, family.models, "\n".join(family.architectures), "\n".join(family.gguf_architectures) or "–")
        for family in FAMILIES
    ]
    facts = [{name: getattr(family, name) for name in FIELDS} for family in FAMILIES]
    print_found(facts, json_output, ("family", "models", "Hugging Face class", "GGUF architecture"), rows)


async def _list_served(url: str, api_key: str | None, json_output: bool) -> None:
    from jaxllm.cli.client import ServerClient

    async with ServerClient(url, api_key) as client:
        found = await client.models()
    rows = []
    for model in found:
        context, parent = model.get("max_model_len"), model.get("parent")
        root = model.get("root") or "–"
        root = f"adapter of {parent}: {root}" if parent else root
        rows.append((model["id"], root, _status(model), "–" if context is None else f"{context:,}"))
    print_found(found, json_output, ("name", "model", "status", "context"), rows)


def _status(model: dict[str, Any]) -> str:
    """'loading: Loading weights (3 of 7)'; other servers than ours may say nothing of it."""
    status = model.get("status") or {}
    detail = status.get("doing") or status.get("error") or ""
    if status.get("total"):
        detail += f" ({status['done']} of {status['total']})"
    return f"{status.get('value', '–')}{': ' if detail else ''}{detail}"


@takes_settings(EngineConfig, positional_model=False, only=("download_dir",))
def list_models(config: EngineConfig, *, json_output: Json = False) -> None:
    """List the models on this machine, and the built-in ones that can be fetched.

    Args:
        json_output: Print a JSON array instead of a table.
    """
    from jaxllm.weights.source import list_local_models

    models = list_local_models(config.download_dir)
    rows = [
        (row.name, format_bytes(row.nbytes), row.about, str(row.path or f"not fetched: jaxllm pull {row.name}"))
        for row in models
    ]
    print_found([row._asdict() for row in models], json_output, ("name", "size", "what", "where"), rows)


@takes_settings(EngineConfig, only=("model", "tokenizer", "revision", "download_dir"))
def pull(config: EngineConfig, *, list_models: Annotated[bool, Parameter(name="--list", negative=())] = False) -> None:
    """Download a model and print where it is.

    Args:
        list_models: Show the built-in names and leave.
    """
    from jaxllm.weights.source import BUILTIN_MODELS, list_builtin_models, resolve_model, resolve_tokenizer

    if list_models:
        rows = [
            (row.name, row.about, format_bytes(row.nbytes), BUILTIN_MODELS[row.name].license, str(row.path or "–"))
            for row in list_builtin_models(config.download_dir)
        ]
        print_table(("name", "what", "size", "licence", "downloaded to"), rows)
        return
    print(resolve_model(config.model, revision=config.revision, download_dir=config.download_dir))
    if config.tokenizer is not None:
        print(resolve_tokenizer(config.tokenizer, revision=config.revision, download_dir=config.download_dir))


@takes_settings(EngineConfig, only=("model", "download_dir"))
def show(config: EngineConfig, *, json_output: Json = False) -> None:
    """Show what a model is: family, parameters, quantization, context, chat template, licence.

    Args:
        json_output: Print one JSON object instead of a table.
    """
    facts = describe(config)
    rows = [(name.replace("_", " "), readable(name, value)) for name, value in facts.items()]
    print_found(facts, json_output, ("", ""), rows)


def describe(config: EngineConfig) -> dict[str, Any]:
    """What a model's files say of it. Raises ModelNotFoundError, CheckpointError."""
    from jaxllm.cli.convert.conversion import kinds_of
    from jaxllm.models.registry import model_spec
    from jaxllm.text.tokenizer import has_chat_template
    from jaxllm.weights import open_checkpoint
    from jaxllm.weights.source import BUILTIN_MODELS, find_local

    model = find_local(config.model, config.download_dir)
    assert model.path is not None
    checkpoint = open_checkpoint(model.path)
    spec = model_spec(checkpoint)
    weights = kinds_of(checkpoint)
    built_in = BUILTIN_MODELS.get(config.model)
    stated = checkpoint.config.get("general.license") or checkpoint.config.get("license")
    checkpoint.close()
    return {
        "name": config.model,
        "path": model.path,
        "size_bytes": model.nbytes,
        "family": spec.family.name,
        "parameters": sum(weights.values()),
        "weights": weights,
        "context": spec.config.max_position_embeddings,
        "chat_template": has_chat_template(model.path),
        "licence": built_in.license if built_in else stated,
    }


@takes_settings(EngineConfig, only=("model", "download_dir"))
def rm(config: EngineConfig, *, yes: Switch = False) -> None:
    """Remove a downloaded model; files and folders of your own are left alone.

    Args:
        yes: Do not ask.
    """
    from jaxllm.weights.source import find_removable, remove_local

    if "model" not in config.model_fields_set:
        raise ConfigError("rm needs the name of a model; `jaxllm list` shows them")
    model = find_removable(config.model, config.download_dir)
    if not yes and not agrees("rm", f"Remove {model.name} ({format_bytes(model.nbytes)}) from {model.path}? [y/N] "):
        print("kept")
        return
    remove_local(model)
    print(f"removed {model.name}")


@takes_settings(EngineConfig)
def plan(
    config: EngineConfig, *, gpu: str | None = None, memory_bandwidth: str | None = None, json_output: Json = False
) -> None:
    """Say whether a model fits, and what its weights, KV pages and steps take; then the same for every --isq.

    Args:
        gpu: A GPU to plan for in place of this machine, as h100, l40s or rtx-4090; another value lists them.
        memory_bandwidth: Bytes a second that a device reads of its memory, as 900GB; by default measured here, or
            what the maker of --gpu states.
        json_output: Print one JSON object instead, with every size of the plan.
    """
    from jaxllm.engine.start.blueprint import plan_engine
    from jaxllm.engine.start.schemes import compare_schemes, known_gpu, measure_bandwidth, table_rows

    stated = None if memory_bandwidth is None else _bytes_per_second(memory_bandwidth)
    known = None if gpu is None else known_gpu(gpu)
    platform = None if known is None else known.platform(config.num_devices)
    found, why_not = None, None
    try:
        found = plan_engine(config, platform)
        why_not = found.why_not
    except DoesNotFitError as error:
        why_not = str(error)
    weights = found.weight_bytes if found else None
    bandwidth = stated or (measure_bandwidth(weights) if known is None else known.bandwidth)
    schemes = compare_schemes(config, bandwidth, platform)
    if json_output:
        more: dict[str, Any] = {"fits": why_not is None, "why_not": why_not, "memory_bandwidth": bandwidth}
        more |= {"schemes": [scheme.as_dict() for scheme in schemes]}
        more |= {} if known is None else {"gpu": known.device, "gpu_source": known.source}
        print(json.dumps((found.as_dict() if found else {}) | more, default=str))
    else:
        fitting = [scheme.name for scheme in schemes if scheme.why_not is None and scheme.name in get_args(Isq)]
        print(*_verdict(config.model, found, why_not, fitting), sep="\n")
        how = "measured" if known is None and not stated else "stated"
        title = (
            f"By --isq, at {bandwidth / 1e9:,.0f} GB/s ({how}); each token that one sequence decodes reads all weights"
        )
        headings = ("weights", "memory", "bits", "bytes a token", "longest context", "tokens/s at most")
        print_table(headings, table_rows(schemes), title=title)
    if known is not None and not json_output:
        print(f"{known.device}: {known.bandwidth / 1e9:,.0f} GB/s, says {known.source}")
    if why_not is not None:
        raise SystemExit(1)


def _verdict(model: str, plan: EnginePlan | None, why_not: str | None, fitting: list[str]) -> Iterator[str]:
    if why_not is not None:
        yield f"{model} does not fit: {why_not}"
        yield f"it fits with --isq {', '.join(fitting)}" if fitting else "no --isq makes it fit: more memory would"
    if plan is None:
        return
    if why_not is None:
        yield f"{model} fits on {plan.device or plan.platform}"
    shapes = (f"{kind} {', '.join(map(str, sizes))}" for kind, sizes in asdict(plan.buckets).items() if sizes)
    yield from (plan.summary(), *plan.notes, f"{plan.num_shapes} shapes are compiled: {'; '.join(shapes)}")


def _bytes_per_second(text: str) -> int:
    try:
        found = parse_bytes(text.strip().removesuffix("/s"))
    except ValueError:
        found = 0
    if not found > 0:
        raise ConfigError(f"--memory-bandwidth is {text!r}; it must be bytes a second, as 900GB")
    return int(found)


def readable(name: str, value: Any) -> str:
    """A size as people read it: bytes in binary units, whole numbers with separators, lists on one line."""
    match name, value:
        case "weights", dict():
            total = sum(value.values())
            return ", ".join(f"{kind} {100 * count / total:.3g} %" for kind, count in value.items())
        case "chat_template", _:
            return "yes" if value else "no: it continues text"
        case "licence", None:
            return "not stated in its files"
        case _, bool() | str() | float():
            return str(value)
        case _, int():
            return format_bytes(value) if "bytes" in name or "memory" in name else f"{value:,}"
        case _, [dict(), *_]:
            return "\n".join(", ".join(readable(name, item).splitlines()) for item in value)
        case _, list() | tuple():
            return ", ".join(readable("", item) for item in value) or "–"
        case _, dict():
            return "\n".join(f"{key}: {readable(str(key), item)}" for key, item in value.items())
    return "–" if value is None else str(value)


@takes_settings(EngineConfig)
def compile(config: EngineConfig, *, output: Annotated[Path, Parameter(name=["--output", "-o"])]) -> None:
    """Compile every step of a model into a folder, from which --executables starts it without compiling.

    Give the settings that it will be served with. The executables are for this version of jaxllm and of JAX, and for
    processors or devices like this machine's; anywhere else one line says what differs, and the steps are compiled.

    Args:
        output: The folder. One may hold the executables of many models and settings.
    """
    from rich.console import Console
    from rich.progress import Progress

    from jaxllm.engine.start.ahead import compile_ahead

    console = Console(stderr=True)
    with Progress(transient=True, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("compiling")

        def show(keys: Iterable[Any], key: Any) -> None:
            keys = list(keys)
            progress.update(bar, total=len(keys), completed=keys.index(key), description=f"compiling {key}")
            if not console.is_terminal:
                print(f"compiling {key}, {keys.index(key) + 1} of {len(keys)}", file=sys.stderr, flush=True)

        try:
            made = compile_ahead(config, output, on_key=show)
        except OSError as error:
            raise ConfigError(f"--output is {str(output)!r}: {reason(error)}") from None
    files = [file for folder in made for file in folder.glob("*.executable")]
    size = format_bytes(sum(file.stat().st_size for file in files))
    print(f"{len(files)} executables, {size}, in {', '.join(map(str, made))}; start with --executables {output}")


CONVERTED = (
    "model", "tokenizer", "revision", "download_dir", "load_format", "dtype", "skip_tokenizer_init", "dequantize",
    "isq", "isq_map", "imatrix", "tensor_parallel_size",
)  # fmt: skip


@takes_settings(EngineConfig, only=CONVERTED)
def convert(
    config: EngineConfig,
    destination: Path,
    *,
    to: Literal["orbax", "safetensors", "gguf"] = "orbax",
    merge_lora: Annotated[list[str] | None, Parameter(negative="")] = None,
) -> None:
    """Write a model anew: for a faster start, quantized once and for all, or for other programs.

    Args:
        destination: The directory, or .gguf file, to write. It must not exist.
        to: orbax is read by jaxllm, in any quantization; safetensors holds floats; gguf takes its block types.
        merge_lora: PATH or PATH=SCALE of a LoRA adapter that is added to the weights; may be given several times.
    """
    from jaxllm.cli.convert.conversion import convert_model
    from jaxllm.progress import progress_bar

    with progress_bar(f"Loading {config.model}") as on_progress:
        done = convert_model(config, in_home(destination), to, on_progress, merge_lora or ())
    print(*done, sep="\n", file=sys.stderr)
    print(destination)
