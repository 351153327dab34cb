"""Compiled steps: ahead of time, beside the loop, the covering ones first."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from functools import partial
from typing import Any, NamedTuple

from jaxllm.compat import compile_lowered, compile_to_save
from jaxllm.engine.core.jobs import Job, Jobs
from jaxllm.engine.core.keys import PLAIN, SAMPLED, SAMPLING, Key, Kind, Variant, room
from jaxllm.engine.core.saved import CompilingProcess, SavedExecutables
from jaxllm.engine.core.sizes import Buckets, smallest_covering
from jaxllm.engine.core.step import StepFunctions
from jaxllm.errors import one_line
from jaxllm.progress import Progress

logger = logging.getLogger(__name__)

URGENT_THREADS = 2

_COMMAND_BUFFER = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE,COLLECTIVES"
_NVIDIA: dict[str, str | int] = {
    "xla_gpu_enable_command_buffer": _COMMAND_BUFFER,
    "xla_gpu_experimental_force_split_k": 1,
    "xla_gpu_shard_autotuning": False,
}
COMPILER_OPTIONS: dict[str, dict[str, str | int]] = {platform: _NVIDIA for platform in ("gpu", "cuda")}
"""By platform. On NVIDIA's a step becomes one CUDA graph: by default XLA leaves out loops, such as the sampler's, and
collectives, and the host would wait in the middle of each step.

A product is one kernel: by a rule of thumb that knows the shape and the number of processors XLA cuts the inputs of
three of a layer's four into parts, for any number of rows, and adds up what they gave in one more kernel each, which
tuning cannot undo. Left whole, they are tuned: among tiles of XLA's and of the library, which parts them in one call
where it finds that better.

Each of several processes tunes by itself: they compile in different orders, and would wait for each other."""

Compiled = Callable[..., Any]


class Compiles(NamedTuple):
    """Counts of compiled executables."""

    foreseen: int
    """Planned executables that are ready."""
    unforeseen: int
    """Executables that were compiled because a request needed them although they were not planned."""
    pending: int
    """Executables asked for and not ready."""
    seconds: float


class Executables:
    """Owns every compiled step function.

    A step takes the smallest compiled bucket that covers it, so that requests run while smaller buckets are still being
    compiled. Only when none covers it does it wait, and if that bucket was not planned, the compile is counted as
    unforeseen.
    """

    def __init__(
        self,
        functions: StepFunctions,
        buckets: Buckets,
        *,
        eager: bool = False,
        saved: SavedExecutables | None = None,
        helper: CompilingProcess | None = None,
        elsewhere: Callable[[Key], bool] = lambda key: True,
        on_made: Callable[[Key], None] = lambda key: None,
        own_of: Callable[[Iterable[Key]], list[Key]] = list,
    ):
        """With `eager` nothing is compiled ahead: each bucket is compiled when it is first needed. `own_of`
        says which executables this one has of some steps: a stage has its layers.

        Executables that `saved` has are loaded, and compiled ones are saved in it. A `helper` process compiles those
        that no request waits for. An executable is ready once it is ready `elsewhere` too; `on_made` is called with
        each that has been made here.
        """
        self._own_of = own_of
        self._elsewhere = elsewhere
        self._on_made = on_made
        self._saved = saved
        self._helper = helper
        self._helped: dict[str, Key] = {}
        """By name, what the helper is to compile and has not."""
        self._helped_all = threading.Event()
        self._functions = functions
        self._sizes: dict[Kind, tuple[int, ...]] = {
            "decode": buckets.decode,
            "verify": buckets.decode,
            "backbone": buckets.prefill,
            "head": buckets.head,
            "encode": buckets.prefill,
        }
        self._buckets = buckets
        self.features = functions.features
        self._eager = eager
        self._jobs = Jobs("compile", urgent_threads=URGENT_THREADS, background_threads=1)
        self._compiles: dict[Key, Job[Compiled]] = {}
        self._lock = threading.Lock()
        self._unforeseen = 0
        self._seconds = 0.0
        self._foreseen: set[Key] = set()
        self._unfinished: set[Key] = set()
        """The foreseen ones that are neither loaded nor compiled yet, and have not failed."""
        self._num_loaded = self._num_compiled = 0
        self._announces = False

    @property
    def compiles(self) -> Compiles:
        """Counts of what has been compiled so far and asked for."""
        pending = len(self._helped) + sum(not job.done() for job in list(self._compiles.values()))
        return Compiles(sum(self._ready(key) for key in self._foreseen), self._unforeseen, pending, self._seconds)

    @property
    def most_rows(self) -> int:
        """Rows of the largest head, and of the one bucket that scores prompt tokens."""
        return self._buckets.head[-1] if self._buckets.head else 0

    def plan(self) -> list[Key]:
        """Every executable, in the order it is wanted.

        First the covering bucket of each phase, then what one lone user runs, then what makes any request possible,
        and then the rest, smallest first.
        """
        b, decodes = self._buckets, self.features.decodes
        plans = [feature.plan(b) for feature in self.features]
        if b.encodes:
            return list(dict.fromkeys([*self.covering_keys(), *(Key("encode", n) for n in b.prefill)]))
        lone = [
            *(Key(decode, b.decode[0]) for decode in decodes),
            Key("backbone", smallest_covering(b.prefill, min(64, b.prefill[-1]))),
        ]
        any_request = [
            Key("head", b.head[-1], SAMPLED),
            *(Key(decode, b.decode[-1], SAMPLED) for decode in decodes),
            Key("put", 0, frozenset({"history"})),
            *(key for plan in plans for key in plan.soon),
        ]
        rest = [Key("backbone", n) for n in b.prefill]
        kinds: list[Kind] = [*decodes, "head", "backbone"]
        of_kind = [(kind, variant) for kind in kinds for variant in self.features.variants(kind)]
        for kind, variant in sorted(of_kind, key=lambda one: len(one[1])):
            rest += [Key(kind, n, variant) for n in self._sizes[kind]]
        last = [key for plan in plans for key in plan.late]
        return [*dict.fromkeys([*self.covering_keys(), *self._own_of([*lone, *any_request, *rest, *last])])]

    def covering_keys(self) -> list[Key]:
        """The largest bucket of each phase: with these, any greedy request can run."""
        b, first = self._buckets, [key for feature in self.features for key in feature.plan(self._buckets).first]
        if b.encodes:  # which run one text in the largest bucket as long as there is no smaller one
            sizes = dict.fromkeys((b.prefill[-1], smallest_covering(b.prefill, min(64, b.prefill[-1]))))
            return [*(Key("encode", n) for n in sizes), *first]
        keys = [
            Key("backbone", b.prefill[-1]),
            Key("head", b.head[-1]),
            *(Key(decode, b.decode[-1]) for decode in self.features.decodes),
            Key("put", 0, frozenset({"admit"})),
        ]
        return self._own_of([*keys, *first])

    def demanded(self, tokens: int, variant: Variant, decodes: bool) -> list[Key]:
        """With these, a request of that many tokens, whose steps need `variant`, can run in any batch, and alone
        without much padding. One that is rare in decodes needs those too, unless none of its tokens `decodes`.
        """
        b, named = self._buckets, self.features.named(variant)
        rare = {kind for feature in named if feature.rare for kind in feature.on}
        fitting = (b.prefill[-1], smallest_covering(b.prefill, min(tokens, b.prefill[-1])))
        keys: list[Key] = []
        if rare:
            keys += [Key("backbone", size, self._least("backbone", variant)) for size in dict.fromkeys(fitting)]
        elif any("backbone" in feature.on for feature in named):
            keys += [Key("backbone", b.prefill[-1], self._least("backbone", variant))]
        if "head" in rare:
            keys += [Key("head", size, self._least("head", variant)) for size in dict.fromkeys((b.head[0], b.head[-1]))]
        elif any("head" in feature.on for feature in named):
            keys += [Key("head", b.head[-1], self._least("head", variant))]
        for kind in self.features.decodes:
            if kind in rare and decodes:
                keys += [Key(kind, n, self._least(kind, variant | SAMPLED)) for n in (b.decode[0], b.decode[-1])]
            elif kind not in rare and any(kind in feature.on for feature in named):
                keys += [Key(kind, b.decode[-1], self._least(kind, variant | SAMPLED))]
        return list(dict.fromkeys(keys))

    def _least(self, kind: Kind, variant: Variant) -> Variant:
        """The cheapest variant of a step that does what such a step has to of `variant`."""
        wanted = variant & SAMPLED if kind in SAMPLING else PLAIN
        for feature in self.features.named(variant):
            if kind in feature.on:
                wanted |= {f"{feature.name}{room(variant, feature.name)}" if feature.rooms else feature.name}
        return self.features.variants(kind, wanted)[0]

    def new_part(self, name: str) -> Any:
        """The part of the state of a rare feature, which has no request yet, on the devices."""
        return self._functions.state.new_part(name)

    def begin(self) -> None:
        """Start compiling the plan; returns at once."""
        if self._eager:
            return
        keys = self.plan()
        self._foreseen, self._unfinished = set(keys), set(keys)
        urgent = self.covering_keys()
        if self._helper is not None and self._saved is not None:
            self._helped = {str(key): key for key in keys if key not in urgent and not self._saved.has(key)}
        for key in keys:
            if str(key) not in self._helped:
                self._submit(key, urgent=key in urgent)
        if self._helped and self._helper is not None:
            self._helper.start(self._load_helped, self._compile_the_rest)
        else:
            self._helped_all.set()

    def wait_until_covered(self, on_progress: Progress | None = None) -> None:
        """Block until a covering bucket of each phase is ready."""
        keys = [] if self._eager else self.covering_keys()
        for done, key in enumerate(keys):
            if on_progress:
                on_progress(done, len(keys))
            self.get(key)

    def announce_end(self) -> None:
        """Log how many of the planned executables are still to be made, and a line when there are no more of these."""
        with self._lock:
            left, planned = len(self._unfinished), len(self._foreseen)
            self._announces = left > 0
        if left:
            text = "requests can run; %d of %d executables are still to be compiled or loaded, in the background"
            logger.info(text, left, planned)

    def _finish(self, key: Key) -> None:
        with self._lock:
            self._unfinished.discard(key)
            if self._unfinished or not self._announces or self._jobs.closed:
                return
            self._announces = False
            loaded, compiled, seconds = self._num_loaded, self._num_compiled, self._seconds
            failed = len(self._foreseen) - loaded - compiled
        logger.info(
            "all executables are done: %d loaded, %d compiled in %.1f s%s",
            *(loaded, compiled, seconds, f", {failed} failed" if failed > 0 else ""),
        )

    def wait(self) -> None:
        """Block until everything that was asked for is compiled."""
        if not self._eager:
            self._helped_all.wait()
        for job in list(self._compiles.values()):
            job.result()

    def covering(self, kind: Kind, needed: int, variant: Variant = PLAIN) -> Key:
        """The smallest ready executable for `needed` rows or tokens that covers `variant`.

        If none is ready it is the one that fits best, which `get` then waits for.
        """
        sizes = self._sizes[kind]
        covering = self.features.variants(kind, variant)
        for size in sizes if not self._eager else ():
            for candidate in covering:
                key = Key(kind, size, candidate)
                if size >= needed and self._ready(key):
                    return key
        return Key(kind, smallest_covering(sizes, needed), covering[0])

    def get(self, key: Key) -> Compiled:
        """One executable, compiled now if it has not been: before all that no request waits for. Any thread may call
        this.

        Raises:
            CancelledError: `close` was called, now or before.
        """
        with self._lock:
            job = self._compiles.get(key)
            if job is None:
                self._helped.pop(str(key), None)
                if not (
                    self._eager
                    or key in self._foreseen
                    or key.kind in ("put", "read")
                    or any(f.rare for f in self.features.named(key.variant))
                ):
                    self._unforeseen += 1
                    logger.warning("compiling %s, which was not planned", key)
                job = self._submit(key, urgent=True)
        if not job.done():
            self._jobs.hurry(job)
        return job.result()

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """The keys whose first use would hold up every request; none when each is compiled at its first use anyway."""
        return [] if self._eager else [key for key in keys if not self._ready(key)]

    def close(self) -> None:
        """Drop what is compiled and what is to be; a compile that has begun goes on, unused."""
        if self._helper is not None:
            self._helper.close()
        self._jobs.close()
        self._compiles = {}

    def _load_helped(self, name: str) -> None:
        with self._lock:
            key = self._helped.pop(name, None)
            if key is not None and key not in self._compiles:
                self._submit(key, urgent=False)

    def _compile_the_rest(self) -> None:
        """The helper has ended: nothing is left where it has done all."""
        for name in list(self._helped):
            self._load_helped(name)
        self._helped_all.set()

    def has(self, key: Key) -> bool:
        """An executable has been made here."""
        job = self._compiles.get(key)
        return job is not None and job.done() and not job.cancelled() and job.exception() is None

    def _ready(self, key: Key) -> bool:
        return self.has(key) and self._elsewhere(key)

    def _submit(self, key: Key, *, urgent: bool) -> Job[Compiled]:
        self._compiles[key] = self._jobs.submit(partial(self._compile, key), urgent=urgent)
        return self._compiles[key]

    def _compile(self, key: Key) -> Compiled:
        try:
            made = self._load_or_compile(key)
        except CancelledError:
            raise
        except Exception as error:
            text = "%s could not be compiled: requests that need it fail, and others run in larger steps: %s"
            logger.warning(text, key, one_line(error))
            raise
        finally:
            self._finish(key)
        self._on_made(key)
        return made

    def _load_or_compile(self, key: Key) -> Compiled:
        began = time.perf_counter()
        function, args = self._functions.step(key)
        saved = self._saved if all(f.is_saved for f in self.features.named(key.variant)) else None
        found = None if saved is None else saved.load(key, args)
        if found is not None:
            with self._lock:
                self._num_loaded += 1
            logger.debug("loaded %s in %.2f s", key, time.perf_counter() - began)
            return found
        lowered = function.lower(*args)  # type: ignore[attr-defined]
        if self._jobs.closed:
            raise CancelledError("the engine was shut down")
        compiled = compile_step(lowered, key, self._functions.platform, saved)
        seconds = time.perf_counter() - began
        with self._lock:
            self._seconds += seconds
            self._num_compiled += 1
        logger.debug("compiled %s in %.2f s", key, seconds)
        return compiled


def compile_step(lowered: Any, key: Key, platform: str, saved: SavedExecutables | None) -> Compiled:
    """The executable of a `jax.stages.Lowered` step; it is saved, where something keeps executables."""
    options = COMPILER_OPTIONS.get(platform)
    if saved is None:
        return compile_lowered(lowered, options)
    compiled, can_be_saved = compile_to_save(lowered, options)
    if can_be_saved:
        saved.save(key, compiled)
    return compiled
