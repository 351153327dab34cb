"""The gated delta rule over packed sequences (Yang et al. 2024, arXiv:2412.06464), in plain XLA.

Each value head keeps a matrix `S [Dk, Dv]` of its sequence, in float32. A token changes it, and then reads it:

    S <- exp(decay) S
    S <- S + k^T (beta (v - k S))
    out = q S

Prompts run in windows of neighbouring tokens, by products of matrices: the tokens of a window depend on each other by a
triangular system, which is solved at once (section 3.3); the windows of a sequence follow each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.pallas_kernels.metadata import StateRows, StepMetadata
from jaxllm.pallas_kernels.states import einsum, kept_length, read_state

EPS = 1e-6


def delta_rule(
    qkv: Float[Array, "T C"],
    decay: Float[Array, "T H"],
    beta: Float[Array, "T H"],
    buffer: Float[Array, "N H Dk Dv"],
    meta: StepMetadata,
    *,
    key_heads: int,
) -> tuple[Float[Array, "T H Dv"], Float[Array, "N H Dk Dv"]]:
    """What each token reads of its sequence's state, and the buffer with the states after this step.

    Args:
        qkv: queries and keys of `K = key_heads` heads each, which are normed here; then the values. Value head `h` uses
            head `h // (H // K)` of queries and keys.
        decay: the logarithm of what the state is multiplied by, at most 0.
        beta: how much of the difference is written, 0 … 1.
        buffer: one sequence's state a row.
    """
    tokens = tokens_of(qkv, decay, beta, key_heads, buffer.shape[2])
    first = min(len(qkv), len(meta.context_len))
    read, buffer = _decodes(Tokens(*(x[:first] for x in tokens)), buffer, meta)
    if meta.decode_only:
        return read, buffer
    return prefill(tokens, jnp.zeros_like(tokens.v).at[:first].set(read), buffer, meta)


def tokens_of(
    qkv: Float[Array, "T C"], decay: Float[Array, "T H"], beta: Float[Array, "T H"], key_heads: int, key_dim: int
) -> Tokens:
    """Queries and keys at length one, queries over the root of the head size as well."""
    (count, heads), keys = decay.shape, key_heads * key_dim
    q, k, v = jnp.split(qkv.astype(jnp.float32), [keys, 2 * keys], axis=-1)
    q, k = (x.reshape(count, key_heads, key_dim) for x in (q, k))
    q, k = (x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS) for x in (q, k))
    q, k = (jnp.repeat(x, heads // key_heads, axis=1) for x in (q * key_dim**-0.5, k))
    return Tokens(q, k, v.reshape(count, heads, -1), decay, beta)


def step(x: Tokens, state: Float[Array, "S H Dk Dv"]) -> tuple[Float[Array, "S H Dv"], Float[Array, "S H Dk Dv"]]:
    """One token of each sequence: what it reads, and the states after it."""
    state = state * jnp.exp(x.decay)[..., None, None]
    change = (x.v - einsum("shk,shkv->shv", x.k, state)) * x.beta[..., None]
    state = state + x.k[..., None] * change[..., None, :]
    return einsum("shk,shkv->shv", x.q, state), state


def _decodes(
    x: Tokens, buffer: Float[Array, "N H Dk Dv"], meta: StepMetadata
) -> tuple[Float[Array, "n H Dv"], Float[Array, "N H Dk Dv"]]:
    rows: StateRows = jax.tree.map(lambda numbers: numbers[: len(x.v)], meta.state_rows)
    live, nowhere = jnp.arange(len(x.v)) < meta.num_decodes, len(buffer)
    read, after = step(x, read_state(buffer, rows))
    for where, wanted in ((rows.written, live), (rows.kept, live & (rows.kept_tokens > 0))):
        buffer = buffer.at[jnp.where(wanted, where, nowhere)].set(after, mode="drop")
    return jnp.where(live[:, None, None], read, 0), buffer


WINDOW = 64


class Tokens(NamedTuple):
    """What the rule takes of each token; heads of `q` and `k` are repeated for the value heads that use them."""

    q: Float[Array, "*n H Dk"]
    k: Float[Array, "*n H Dk"]
    v: Float[Array, "*n H Dv"]
    decay: Float[Array, "*n H"]
    beta: Float[Array, "*n H"]


class _Windows(NamedTuple):
    """What all windows know without any state, of each token `w` of a window.

    Attributes:
        q: after the decay since the sequence's first token in the window.
        attention: how much each token reads of what each wrote.
        write, forget: what each token writes is `write - forget S`, where S is the state before the window.
        decay: the logarithm of the decay since the sequence's first token in the window, its own included.
    """

    k: Float[Array, "N H W Dk"]
    q: Float[Array, "N H W Dk"]
    attention: Float[Array, "N H W W"]
    write: Float[Array, "N H W Dv"]
    forget: Float[Array, "N H W Dk"]
    decay: Float[Array, "N H W"]


def prefill(
    x: Tokens, out: Float[Array, "T H Dv"], buffer: Float[Array, "N H Dk Dv"], meta: StepMetadata
) -> tuple[Float[Array, "T H Dv"], Float[Array, "N H Dk Dv"]]:
    """Runs the sequences that have more than one token in this step; `out` has what the others read.

    Windows are cut across the step, not the sequences, so that their number is fixed: what needs no state is computed
    for all at once. Then each pair of a sequence and a window that has tokens of it takes its turn.
    """
    rows, count, last_seq = meta.state_rows, len(x.v), len(meta.context_len) - 1
    width = min(WINDOW, 1 << (count - 1).bit_length())
    padding = -count % width
    padded = Tokens(*(jnp.pad(a, [(0, padding), *[(0, 0)] * (a.ndim - 1)]) for a in x))
    seqs = jnp.pad(meta.seq_ids, (0, padding), constant_values=len(meta.context_len))
    seqs = jnp.where(seqs >= meta.num_decodes, seqs, len(meta.context_len)).reshape(-1, width)
    begins = meta.query_start[jnp.minimum(seqs, last_seq)] - width * jnp.arange(len(seqs))[:, None]
    windows = _windows(padded, seqs, jnp.clip(begins, 0, width - 1), last_seq)
    out = jnp.pad(out, [(0, padding), (0, 0), (0, 0)]).reshape(-1, width, *out.shape[1:])
    kept_after = kept_length(rows, meta)
    kept_at = meta.query_start[:-1] + kept_after - 1

    def turn(carry: Any) -> Any:
        seq, window, out, buffer = carry
        w = _Windows(*(lax.dynamic_index_in_dim(a, window, keepdims=False) for a in windows))
        mine = lax.dynamic_index_in_dim(seqs, window, keepdims=False) == seq
        goes_on = window * width > meta.query_start[seq]
        row = jnp.where(goes_on, rows.written[seq], rows.read[seq])
        state = lax.dynamic_index_in_dim(buffer, row, keepdims=False)
        state = jnp.where(goes_on | ~rows.begins[seq], state, 0)
        written = jnp.where(mine[:, None], w.write - einsum("hwk,hkv->hwv", w.forget, state), 0)
        read = einsum("hwk,hkv->hwv", w.q, state) + einsum("hwu,huv->hwv", w.attention, written)
        old = lax.dynamic_index_in_dim(out, window, keepdims=False)
        out = out.at[window].set(jnp.where(mine[:, None, None], read.swapaxes(0, 1), old))
        end, keep = meta.query_start[seq + 1] - 1, kept_at[seq] - window * width
        last = jnp.minimum(end - window * width, width - 1)
        keeps = (kept_after[seq] > 0) & (keep >= 0) & (keep < width)
        after = [_state_after(w, written, mine, state, at) for at in (last, jnp.clip(keep, 0, width - 1))]
        where = jnp.stack([rows.written[seq], jnp.where(keeps, rows.kept[seq], len(buffer))])
        buffer = buffer.at[where].set(jnp.stack(after), mode="drop")
        done = (window + 1) * width > end
        following = jnp.minimum(seq + 1, last_seq)
        window = jnp.where(done, meta.query_start[following] // width, window + 1)
        return jnp.where(done, seq + 1, seq), window, out, buffer

    first = jnp.minimum(meta.num_decodes, last_seq)
    carry = (meta.num_decodes, meta.query_start[first] // width, out, buffer)
    _, _, out, buffer = lax.while_loop(lambda carry: carry[0] < meta.num_seqs, turn, carry)
    return out.reshape(-1, *out.shape[2:])[:count], buffer


def _windows(x: Tokens, seqs: Int[Array, "N W"], begins: Int[Array, "N W"], last_seq: int) -> _Windows:
    """`begins`: the place in the window of each token's sequence's first one there."""
    width = seqs.shape[1]
    q, k, v, decay, beta = (jnp.moveaxis(a.reshape(-1, width, *a.shape[1:]), 2, 1) for a in x)
    live = (seqs <= last_seq)[:, None]
    decay, beta = jnp.where(live, decay, 0), jnp.where(live, beta, 0)
    total = jnp.cumsum(decay, axis=-1)
    begin = jnp.broadcast_to(begins[:, None], total.shape)
    since = jnp.where(live, total - jnp.take_along_axis(total - decay, begin, axis=-1), 0)
    together = (seqs[:, :, None] == seqs[:, None, :])[:, None] & jnp.tri(width, dtype=bool)
    pairs = jnp.exp(jnp.where(together & live[..., None], total[..., :, None] - total[..., None, :], -jnp.inf))
    system = jnp.tril(einsum("nhwk,nhuk->nhwu", beta[..., None] * k, k) * pairs, -1)
    targets = jnp.concatenate([v, k * jnp.exp(since)[..., None]], axis=-1) * beta[..., None]
    solved = einsum("nhwu,nhuc->nhwc", _inverse(system), targets)
    return _Windows(
        k=k,
        q=q * jnp.exp(since)[..., None],
        attention=einsum("nhwk,nhuk->nhwu", q, k) * pairs,
        write=solved[..., : v.shape[-1]],
        forget=solved[..., v.shape[-1] :],
        decay=since,
    )


def _inverse(lower: Float[Array, "N H W W"]) -> Float[Array, "N H W W"]:
    """Of the identity plus what is below the diagonal of `lower`, whose size is a power of two.

    Blocks on the diagonal are inverted in pairs, from the smallest on: `[[A, 0], [B, C]]` has the inverse
    `[[A^-1, 0], [-C^-1 B A^-1, C^-1]]`. XLA's own solver is LAPACK on a CPU, which a saved executable does not find.
    """
    *lead, size, _ = lower.shape
    inverse, half = jnp.ones((*lead, size, 1, 1)), 1
    while half < size:
        blocks = lower.reshape(*lead, size // (2 * half), 2 * half, size // (2 * half), 2 * half)
        below = jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)[..., half:, :half]
        a, c = inverse[..., ::2, :, :], inverse[..., 1::2, :, :]
        corner = -einsum("nhbij,nhbjk,nhbkl->nhbil", c, below, a)
        inverse = jnp.block([[a, jnp.zeros_like(a)], [corner, c]])
        half *= 2
    return inverse[..., 0, :, :]


def _state_after(
    w: _Windows, written: Float[Array, "H W Dv"], mine: Bool[Array, "W"], state: Float[Array, "H Dk Dv"],
    last: Int[Array, ""],
) -> Float[Array, "H Dk Dv"]:  # fmt: skip
    seen = mine & (jnp.arange(len(mine)) <= last)
    total = w.decay[:, last]
    fading = jnp.exp(jnp.where(seen, total[:, None] - w.decay, -jnp.inf))
    return state * jnp.exp(total)[:, None, None] + einsum("hwk,hwv->hkv", w.k * fading[..., None], written)
