"""The bytes that a Pallas kernel loads of each of its arrays, counted by running its programs one after the other.

A kernel is run as JAX traced it, operation by operation, so that every load is seen with the indices and the mask that
it has: what a program loads again is in its cache and counts once. What no index, mask or branch depends on is never
computed. Nothing needs a GPU.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.tree_util import tree_unflatten


class Later:
    """A value that is computed when it is first asked for."""

    def __init__(self, compute: Callable[[], Any]):
        self.compute: Callable[[], Any] | None = compute
        self.value: Any = None

    def __call__(self) -> Any:
        if self.compute is not None:
            self.value, self.compute = self.compute(), None
        return self.value


class Memory:
    """One of a kernel's arrays, what of it was loaded, and what is still to be stored in it."""

    def __init__(self, aval: Any, array: Any):
        self.aval, self.array = aval, array
        self.loaded = 0
        self.seen = np.zeros(aval.shape, np.bool_)
        self.stores: list[Callable[[], None]] = []

    def load(self, transforms: Any, mask: Any = None, other: Any = None) -> Later:
        places, live = self._places(transforms, mask)
        self.seen[tuple(place[live] for place in places)] = True
        return Later(lambda: np.where(live, self.contents()[places], 0 if other is None else _now(other)))

    def store(self, transforms: Any, value: Any, mask: Any = None) -> None:
        def run() -> None:
            places, live = self._places(transforms, mask)
            self.array[tuple(place[live] for place in places)] = np.broadcast_to(_now(value), live.shape)[live]

        self.stores.append(run)

    def contents(self) -> Any:
        self.array = np.array(_now(self.array)) if self.stores else np.asarray(_now(self.array))
        while self.stores:
            self.stores.pop(0)()
        return self.array

    def end_program(self) -> None:
        self.loaded += int(self.seen.sum()) * self.aval.dtype.itemsize
        self.seen[:] = False

    def _places(self, transforms: Any, mask: Any) -> tuple[tuple[Any, ...], Any]:
        """An index of each axis, and which of them are not masked off: those may lie anywhere."""
        (indexer,) = transforms
        places = np.broadcast_arrays(*(np.asarray(_now(index)) for index in indexer.indices))
        live = np.broadcast_to(True if mask is None else _now(mask), places[0].shape)
        if mask is None:
            return tuple(places), live
        sizes = zip(places, self.aval.shape, strict=True)
        return tuple(np.clip(place, 0, size - 1) for place, size in sizes), live


def bytes_read(function: Callable[..., Any], *arguments: Any) -> Counter[tuple[tuple[int, ...], str]]:
    """By shape and type of an array: the bytes of it that the kernels of `function(*arguments)` load."""
    found: Counter[tuple[tuple[int, ...], str]] = Counter()
    closed = jax.make_jaxpr(function)(*arguments)

    def kernel(eqn: Any, values: Sequence[Any]) -> list[Any]:
        given = [Memory(variable.aval, value) for variable, value in zip(eqn.invars, values, strict=True)]
        made = [Memory(out.aval, Later(partial(np.zeros, out.aval.shape, out.aval.dtype))) for out in eqn.outvars]
        for program in itertools.product(*map(range, eqn.params["grid_mapping"].grid)):
            _run(eqn.params["jaxpr"], [], [*given, *made], program, kernel)
            for memory in given:
                memory.end_program()
        for memory in given:
            found[memory.aval.shape, str(memory.aval.dtype)] += memory.loaded
        return [Later(memory.contents) for memory in made]

    _run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments), (), kernel)
    return found


def _now(value: Any) -> Any:
    return value() if isinstance(value, Later) else value


def _run(
    jaxpr: Jaxpr, consts: Sequence[Any], arguments: Sequence[Any], program: tuple[int, ...], kernel: Callable[..., Any]
) -> list[Any]:
    """What a traced function gives for values; `Memory` stands for a reference."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else values[variable]

    def call(inner: Any, given: Sequence[Any]) -> list[Any]:
        closed = isinstance(inner, ClosedJaxpr)
        return _run(inner.jaxpr if closed else inner, inner.consts if closed else [], given, program, kernel)

    for eqn in jaxpr.eqns:
        out = _apply(eqn, [read(variable) for variable in eqn.invars], program, call, kernel)
        values.update(zip(eqn.outvars, out, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _apply(eqn: Any, given: list[Any], program: tuple[int, ...], call: Any, kernel: Any) -> Sequence[Any]:
    params, outs = eqn.params, eqn.outvars
    match eqn.primitive.name:
        case "pallas_call":
            return kernel(eqn, given)  # type: ignore[no-any-return]
        case "program_id":
            return [np.int32(program[params["axis"]])]
        case "get":
            memory, *flat = given
            return [memory.load(tree_unflatten(params["tree"], flat))]
        case "masked_load":
            memory, transforms, mask, other = tree_unflatten(params["args_tree"], given)
            return [memory.load(transforms, mask, other)]
        case "masked_swap":
            memory, transforms, value, mask = tree_unflatten(params["args_tree"], given)
            memory.store(transforms, value, mask)
            return [value]
        case "cond":
            return call(params["branches"][int(_now(given[0]))], given[1:])  # type: ignore[no-any-return]
        case "while":
            tests, consts = params["cond_nconsts"], params["body_nconsts"]
            carry = given[tests + consts :]
            while bool(_now(call(params["cond_jaxpr"], [*given[:tests], *carry])[0])):
                carry = call(params["body_jaxpr"], [*given[tests : tests + consts], *carry])
            return carry
        case "scan":
            kept = len(given) - len(outs)  # kernels scan over nothing but numbers
            carry = given[kept:]
            for _ in range(params["length"]):
                carry = call(params["jaxpr"], [*given[:kept], *carry])
            return carry
        case "jit" | "pjit" | "closed_call" | "custom_jvp_call" | "custom_vjp_call":
            return call(params.get("jaxpr") or params["call_jaxpr"], given)  # type: ignore[no-any-return]

    def compute() -> Any:
        made = eqn.primitive.bind(*map(_now, given), **params)
        return made if eqn.primitive.multiple_results else [made]

    computed = Later(compute)
    return [Later(lambda index=index: computed()[index]) for index in range(len(outs))]
