"""That annotations are checked while tests run: a test that passes shows that those it went through are true."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, replace

import jax.numpy as jnp
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Array, Float, TypeCheckError, jaxtyped

from jaxllm.models.layers.rope import Angles
from jaxllm.sharding.mesh import Segment
from tests.support.typecheck import checked, forget_functions

Pair = tuple[Float[Array, "B D"], Float[Array, "B D"]]


@jaxtyped(typechecker=checked)
def add(pair: Pair, scale: float = 1) -> Float[Array, "B D"]:
    return (pair[0] + pair[1] * scale)[: len(pair[0])]


@jaxtyped(typechecker=checked)
def half(count: int) -> int:
    return count / 2 if count % 2 else count // 2  # type: ignore[return-value]


@jaxtyped(typechecker=checked)
@dataclass(frozen=True)
class Named:
    name: str
    count: int = 0


def test_shapes_agree_with_each_other() -> None:
    two, three = jnp.ones((2, 4)), jnp.ones((3, 4))
    assert add((two, two), 2).shape == (2, 4)
    for wrong in ((two, three), (two, two.astype(int)), (jnp.ones(4), jnp.ones(4))):
        with pytest.raises(TypeCheckError):
            add(wrong)


def test_what_has_no_shape_is_checked_as_well() -> None:
    assert half(4) == 2
    for wrong in (3, 4.0, "4"):
        with pytest.raises(BeartypeCallHintViolation):
            half(wrong)


def test_dataclasses_are_made_of_what_they_say() -> None:
    assert replace(Named("a"), count=3) == Named("a", 3)
    with pytest.raises(BeartypeCallHintViolation):
        Named("a", "b")  # type: ignore[arg-type]


def test_the_packages_are_checked() -> None:
    with pytest.raises((TypeCheckError, BeartypeCallHintViolation)):
        Angles(jnp.ones((3, 4)), jnp.ones((2, 4)))
    with pytest.raises((TypeCheckError, BeartypeCallHintViolation)):
        Segment("rows", 1)  # type: ignore[arg-type]


class Pages:
    """Something large."""


def test_what_functions_inside_others_refer_to_can_be_let_go_of():
    """Whole engines were kept until the end of a run, and XLA died of too many mappings."""

    def make() -> weakref.ref[Pages]:
        pages = Pages()

        def inner(count: int) -> object:
            return pages

        assert checked(inner)(1) is pages
        return weakref.ref(pages)

    pages = make()
    forget_functions()
    gc.collect()
    assert pages() is None
