"""The device's memory of every running sequence between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxllm.engine.core.packing import SETTING_FLOATS, SETTING_INTS, admit_packing

if TYPE_CHECKING:
    from jaxllm.engine.core.registry import Features
    from jaxllm.engine.core.sizes import StepSizes


class Slots(NamedTuple):
    """Per-sequence state, one row a slot; the last row is that of padding.

    A step reads here what it was told before: it is sent only what changed. `position` is the next token's to be run,
    `page_table[slot, i]` the page of positions `i * page_size` and on, `settings_*` what packing.py lays out.

    `history[slot, p]` is the token at position `p`. A step writes the tokens it samples, so that the next step can be
    dispatched before the host has seen them; a backbone writes those it computes. A
    prompt's cached prefix is written (`put_history`) only for features that read the whole history, as penalties do.
    `L` is the longest context plus one.
    """

    history: Int[Array, "slots L"]
    position: Int[Array, "slots"]
    page_table: Int[Array, "slots P"]
    setting_ints: Int[Array, "slots I"]
    setting_floats: Float[Array, "slots F"]
    of: dict[str, dict[str, jax.Array]]
    """The arrays that features keep of each slot, by the feature's name and their own."""


def slot_shapes(sizes: StepSizes, features: Features) -> Slots:
    """Abstract arrays for the sequences of an engine."""

    def shape(*row: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((sizes.num_slots + 1, *row), dtype)

    return Slots(
        history=shape(sizes.max_model_len + 1),
        position=shape(),
        page_table=shape(sizes.pages_per_seq),
        setting_ints=shape(SETTING_INTS.size),
        setting_floats=shape(SETTING_FLOATS.size, dtype=jnp.float32),
        of={
            feature.name: {name: shape(*row, dtype=dtype) for name, (row, dtype) in rows.items()}
            for feature in features
            if (rows := feature.slot(sizes)) and not feature.rare
        },
    )


def admit(slots: Slots, ints: Int[Array, "n"], floats: Float[Array, "F"], features: Features) -> Slots:
    """A request takes its slot; `ints` as `admit_packing` lays them out."""
    x = admit_packing(slots.page_table.shape[1]).unpack(ints)
    rows = {"position": x["position"], "page_table": x["page_table"], "setting_ints": x["settings"]}
    of = {name: features[name].begun(own, x["slot"], x["position"]) for name, own in slots.of.items()}
    return _put(slots._replace(of=of), x["slot"], **rows, setting_floats=floats)


def put_history(slots: Slots, slot: Int[Array, "1"], history: Int[Array, "L"]) -> Slots:
    """The tokens of the request that took the slot, up to those that steps will write."""
    return _put(slots, slot[0], history=history)


def took(slots: Slots, slot: Int[Array, "R"], tokens: Int[Array, "R"]) -> Slots:
    """The next token of each slot, which another stage has sampled."""
    return slots._replace(history=slots.history.at[slot, slots.position[slot]].set(tokens))


def settings(slots: Slots, slot: Int[Array, "R"]) -> dict[str, jax.Array]:
    """The settings of each of `R` slots, by name."""
    ints, floats = slots.setting_ints[slot], slots.setting_floats[slot]
    return SETTING_INTS.unpack(ints) | SETTING_FLOATS.unpack(floats)


def _put(slots: Slots, slot: Int[Array, ""], **rows: jax.Array) -> Slots:
    def put(old: jax.Array, row: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(old, row[None], (slot, *(0 for _ in row.shape)))

    return slots._replace(**{name: put(getattr(slots, name), row) for name, row in rows.items()})  # type: ignore[arg-type]
