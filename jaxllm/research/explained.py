"""The executables of one step, and its time compared with the time for reading its bytes; traces of steps."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import Literal, Self
from urllib.parse import quote

from jaxllm.config.values import format_bytes
from jaxllm.engine.core.handle import RanExecutable, RanSequence, RanStep, StepKind
from jaxllm.engine.core.keys import Kind
from jaxllm.engine.core.sizes import StepSizes
from jaxllm.engine.features.readout import SUMS
from jaxllm.engine.start.memory import weight_bytes
from jaxllm.errors import ConfigError, InvalidRequestError
from jaxllm.models.caches import CacheSpec, Joined, Paged, Shared, parts_of
from jaxllm.models.config import DecoderConfig
from jaxllm.models.registry import ModelParts
from jaxllm.weights.loader import ParamSpec

Bandwidth = float | Literal["measure"] | None  # bytes a second; None is NVIDIA's figure, if it is known

RUNS_LAYERS: tuple[Kind, ...] = ("decode", "verify", "backbone", "encode")
RUNS_HEAD: tuple[Kind, ...] = ("decode", "verify", "head", "read")
_TABLES = ("embed.weight", "*.embed.weight", "positions")
_EXPERTS = "*.experts.*"
_HEADINGS = ("executable", "runs", "real", "padded to", "weights read", "caches read")


@dataclass(frozen=True)
class StepPart:
    """An executable of a step.

    Attributes:
        name: as `jaxllm plan` and /metrics call it: `decode-8` is the decode that is padded to 8 sequences.
        runs: how often it ran, or how many tokens one run made of each sequence.
        real: rows or tokens that belong to requests; None if that is not counted.
        padded: rows or tokens that it computes; None if its size has no meaning.
        weight_bytes, cache_bytes: bytes that it reads of a device's memory.
    """

    name: str
    runs: int
    real: int | None
    padded: int | None
    weight_bytes: int
    cache_bytes: int

    @property
    def cells(self) -> tuple[str, ...]:
        counts = ("–" if count is None else f"{count:,}" for count in (self.real, self.padded))
        sizes = (format_bytes(size) if size else "–" for size in (self.weight_bytes, self.cache_bytes))
        return (self.name, f"{self.runs:,}", *counts, *sizes)


@dataclass(frozen=True, repr=False)
class StepExplanation:
    """A step that ran; notebooks show a picture of it, and `print` a table.

    Attributes:
        kind: "decode" or "prefill".
        parts: the executables in their order.
        sequences: the tokens and the context of each request in it.
        bandwidth: bytes a second, and their source; None if unknown.
        seconds: from the reading of the step before it, or from its enqueueing if that was later, until its results
            were on the host.
        waited: whether the host waited for them. Otherwise the step had ended some time before.
        leaves_out: reads that the bytes do not count.
    """

    kind: StepKind
    parts: Sequence[StepPart]
    sequences: Sequence[RanSequence]
    bandwidth: float | None
    bandwidth_source: str
    seconds: float | None
    waited: bool = True
    leaves_out: Sequence[str] = ()

    @property
    def weight_bytes(self) -> int:
        return sum(part.weight_bytes for part in self.parts)

    @property
    def cache_bytes(self) -> int:
        return sum(part.cache_bytes for part in self.parts)

    @property
    def floor_seconds(self) -> float | None:
        """The time for reading these bytes; None if the bandwidth is unknown. No step is faster."""
        return None if not self.bandwidth else (self.weight_bytes + self.cache_bytes) / self.bandwidth

    @property
    def title(self) -> str:
        contexts = [sequence.context for sequence in self.sequences]
        least, most = min(contexts, default=0), max(contexts, default=0)
        reach = f"{most:,}" if least == most else f"{least:,} to {most:,}"
        tokens = sum(sequence.length for sequence in self.sequences)
        return f"The last {self.kind}: {tokens:,} tokens of {len(contexts):,} sequences, contexts of {reach} tokens"

    @property
    def summary(self) -> list[str]:
        lines = [
            f"{format_bytes(self.weight_bytes)} of weights and {format_bytes(self.cache_bytes)} of caches are read"
        ]
        floor = self.floor_seconds
        if floor is None:
            lines.append(f"The floor is not known: {self.bandwidth_source}")
        elif self.bandwidth is not None:
            rate = f"{self.bandwidth / 1e9:,.1f} GB/s ({self.bandwidth_source})"
            lines.append(f"At {rate} that takes {_time(floor)}: no step is faster")
        if self.seconds is not None:
            most = "" if self.waited else "at most "
            times = f", {self.seconds / floor:,.1f} times the floor" if floor else ""
            late = "" if self.waited else "; the host looked at it some time after it had ended"
            lines.append(f"It took {most}{_time(self.seconds)}{times}{late}")
        return lines + ([f"Not counted: {', '.join(self.leaves_out)}"] if self.leaves_out else [])

    def __str__(self) -> str:
        rows = [_HEADINGS, *(part.cells for part in self.parts)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([self.title, *table, *self.summary])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cell = '<td style="text-align:left;padding:0 1em 0 0">'
        rows = "".join(
            f"<tr>{''.join(f'{cell}{escape(text)}</td>' for text in row)}</tr>"
            for row in (_HEADINGS, *(part.cells for part in self.parts))
        )
        bars = [
            _bar(part.name, {"real": part.real, "padding": part.padded - part.real}, "{:,} rows of {}")
            for part in self.parts
            if part.real is not None and part.padded
        ]
        bars.append(_bar("bytes read", {"weights": self.weight_bytes, "caches": self.cache_bytes}, "{:,} bytes of {}"))
        if self.floor_seconds and self.seconds:
            over = max(self.seconds - self.floor_seconds, 0.0)
            bars.append(_bar("time", {"the floor": self.floor_seconds, "above it": over}, "{:.3g} s: {}"))
        lines = "".join(f"<div>{escape(line)}</div>" for line in self.summary)
        return f"<div><b>{escape(self.title)}</b><table>{rows}</table>{''.join(bars)}{lines}</div>"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _bar(name: str, shares: Mapping[str, float], said: str) -> str:
    total = sum(shares.values()) or 1
    pieces = "".join(
        f'<span title="{escape(said.format(share, label))}" style="display:inline-block;height:1em;'
        f'width:{100 * share / total:.2f}%;background-color:rgba({colour})"></span>'
        for (label, share), colour in zip(shares.items(), ("60,120,220,.8", "230,120,0,.5"), strict=True)
    )
    legend = f"{name}: {' | '.join(shares)}"
    return (
        f'<div style="max-width:48em;margin:.2em 0"><div style="font-size:85%">{escape(legend)}</div>'
        f'<div style="white-space:nowrap;font-size:100%;line-height:1">{pieces}</div></div>'
    )


def explain(
    steps: Mapping[StepKind, RanStep], sizes: StepSizes, model: ModelParts, kind: StepKind | None, bandwidth: Bandwidth
) -> StepExplanation:
    """The last step of `kind`, or of all. Raises InvalidRequestError if none has run, or an argument is wrong."""
    if kind not in (None, "decode", "prefill"):
        raise InvalidRequestError(f"kind is {kind!r}; it must be 'decode', 'prefill' or None for the last step", "kind")
    found = ([*steps.values()][-1] if steps else None) if kind is None else steps.get(kind)
    if found is None:
        raise InvalidRequestError(f"no {kind or 'step'} has run since the engine started; generate something first")
    rate, source = _bandwidth(bandwidth)
    parts: dict[str, StepPart] = {}
    for executable in found.executables:
        name, size = str(executable.key), executable.key.size or None
        once = StepPart(
            name, executable.times, executable.used, size, weights_read(model, executable),
            caches_read(sizes, executable, found.sequences),
        )  # fmt: skip
        parts[name] = once if name not in parts else _added(parts[name], once)
    variants = [executable.key.variant for executable in found.executables]
    left_out = ["experts beyond those of one token"] * (model.spec.config.moe is not None)
    left_out += ["the draft model"] * bool(sizes.further_caches)
    left_out += ["adapters"] * any("adapters" in variant for variant in variants)
    return StepExplanation(
        found.kind, list(parts.values()), found.sequences, rate, source, found.seconds, found.waited, left_out
    )


def _added(one: StepPart, other: StepPart) -> StepPart:
    real = None if one.real is None or other.real is None else one.real + other.real
    sizes = one.weight_bytes + other.weight_bytes, one.cache_bytes + other.cache_bytes
    return StepPart(one.name, one.runs + other.runs, real, one.padded, *sizes)


def _bandwidth(given: Bandwidth) -> tuple[float | None, str]:
    from jaxllm.engine.start.schemes import GPUS, measure_bandwidth
    from jaxllm.sharding.devices import find_devices

    if given == "measure":
        return measure_bandwidth(), "measured"
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
            raise InvalidRequestError(
                f"bandwidth is {given!r}; it must be bytes a second, 'measure', or None for what is known", "bandwidth"
            )
        return float(given), "stated"
    name = find_devices()[0].device_kind
    known = next((gpu for gpu in GPUS.values() if gpu.device == name), None)
    if known is None:
        return None, f'give the bandwidth of {name} in bytes a second, or bandwidth="measure"'
    return float(known.bandwidth), f"stated by {known.source}"


def weights_read(model: ModelParts, executable: RanExecutable) -> int:
    """Bytes of weights that an executable reads of a device, each once for every run of the model.

    Tables of embeddings count a row for each token; experts count those of one token, the least for any number.
    """
    kind, total = executable.key.kind, 0
    for param in model.params:
        if kind in RUNS_LAYERS and not _is_head(param, model.spec.config, alone=True):
            total += _layers_read(param, model, executable.used or 0)
        if kind in RUNS_HEAD and executable.key != SUMS and _is_head(param, model.spec.config):
            total += weight_bytes([param], model.options.tp)
    return total * executable.times


def _is_head(param: ParamSpec, config: DecoderConfig, *, alone: bool = False) -> bool:
    """Whether the head reads it; with `alone`, whether nothing else does."""
    if config.encoder is not None:
        return False
    if param.path == "embed.weight":
        return config.tie_word_embeddings and not alone
    return param.path.split(".")[0] in ("head", "norm")


def _layers_read(param: ParamSpec, model: ModelParts, tokens: int) -> int:
    whole = weight_bytes([param], model.options.tp)
    if any(fnmatch.fnmatchcase(param.path, table) for table in _TABLES):
        return whole // param.shape[0] * min(tokens, param.shape[0])
    moe = model.spec.config.moe
    if moe and fnmatch.fnmatchcase(param.path, _EXPERTS):
        return whole * moe.top_k // moe.num_experts
    return whole


def caches_read(sizes: StepSizes, executable: RanExecutable, sequences: Sequence[RanSequence]) -> int:
    """Bytes of keys, values and states that an executable reads of a device's caches, each once a run."""
    if executable.key.kind not in ("decode", "verify", "backbone"):
        return 0
    grown = [RanSequence(each.length, each.context + step) for each in sequences for step in range(executable.times)]
    return sum(_read(sizes, part, grown) for spec in sizes.caches for part in _parts(sizes.caches, spec))


def _parts(specs: Sequence[CacheSpec], spec: CacheSpec) -> list[CacheSpec]:
    if isinstance(spec, Shared):
        return _parts(specs, specs[spec.layer])
    return list(parts_of([spec])) if isinstance(spec, Joined) else [spec]


def _read(sizes: StepSizes, part: CacheSpec, sequences: Sequence[RanSequence]) -> int:
    layout = sizes.cache_layout
    if isinstance(part, Paged):
        return layout.page_bytes([part]) * sum(_seen(part, each) for each in sequences) // sizes.page_size
    return layout.state_bytes([part]) * len(sequences)


def _seen(part: Paged, sequence: RanSequence) -> int:
    """Tokens whose keys are seen by some token of the step."""
    if part.window is None:
        return sequence.context
    first = sequence.context - sequence.length
    if part.chunked:
        return sequence.context - first // part.window * part.window
    return min(sequence.context, part.window + sequence.length - 1)


class ProfilerTrace:
    """A trace of the devices and the host in a `with` block, written for Perfetto and XProf; see `LLM.trace`."""

    def __init__(self, folder: str | PathLike[str]):
        self.folder = Path(folder)  # the folder to open in XProf
        self._found: Path | None = None

    @property
    def path(self) -> Path:
        """The file to open at https://ui.perfetto.dev. Raises InvalidRequestError before the `with` block has ended."""
        if self._found is None:
            raise InvalidRequestError("the trace is written when its with block has ended")
        return self._found

    def __enter__(self) -> Self:
        import jax

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"folder is {str(self.folder)!r}: {error.strerror}; it must be a folder") from None
        try:
            jax.profiler.start_trace(str(self.folder), create_perfetto_trace=True)
        except RuntimeError as error:
            raise InvalidRequestError(f"no trace can be begun: {error}") from None
        return self

    def __exit__(self, *_: object) -> None:
        import jax

        jax.profiler.stop_trace()
        written = self.folder.glob("plugins/profile/*/perfetto_trace.json.gz")
        self._found = max(written, key=lambda path: path.stat().st_mtime_ns)

    def __repr__(self) -> str:
        return f"ProfilerTrace({str(self._found or self.folder)!r}{'' if self._found else ', not written yet'})"

    def _repr_html_(self) -> str:
        if self._found is None:
            return escape(repr(self))
        link = quote(os.path.relpath(self._found))
        return (
            f'<a href="{link}" download>{escape(str(self._found))}</a>: to be opened at '
            '<a href="https://ui.perfetto.dev" target="_blank" rel="noopener">ui.perfetto.dev</a>'
        )
