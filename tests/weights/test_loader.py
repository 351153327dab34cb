"""Checkpoint tensors onto the mesh, with a checkpoint that watches how it is read."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm.cpu_kernels.tiles import Room
from jaxllm.errors import CheckpointError
from jaxllm.quantization.gguf_weight import GgufKind
from jaxllm.quantization.stored import Stored
from jaxllm.quantization.weight import Dense, DenseKind, Fused
from jaxllm.sharding.mesh import TENSOR, Layout, Segment, build_meshes, padded_rows
from jaxllm.weights import loader
from jaxllm.weights.checkpoint import Checkpoint, TensorInfo
from jaxllm.weights.loader import READ_AHEAD, ParamSpec, dummy_parameters, load_parameters
from jaxllm.weights.names import AnyOf, Source, expand, plus_one, unpermute_rope


class WatchedCheckpoint(Checkpoint):
    format = "safetensors"
    path = Path("watched")

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays
        self.config: dict = {}
        self.generation_config: dict = {}
        self.tensors = {name: TensorInfo(a.shape, "F32") for name, a in arrays.items()}
        self.reads: list[str] = []
        self._lock = threading.Lock()

    def read(self, name: str) -> Stored:
        with self._lock:
            self.reads.append(name)
        shape, dtype, _ = self.tensors[name]
        return Stored(self.arrays[name], dtype, shape)

    def close(self) -> None:
        pass


FLOAT32 = np.dtype(np.float32)


def norm(path: str, rows: int = 4) -> ParamSpec:
    return ParamSpec(path, (rows,), FLOAT32, (None,), None)


@pytest.fixture
def mesh():
    return build_meshes(1)[0]


def test_fuses_transforms_pads_and_casts(mesh):
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(rows, 3)).astype(np.float32) for name, rows in (("q", 4), ("k", 2), ("embed", 5))}
    arrays["norm"] = np.arange(3, dtype=np.float32)
    bfloat16 = np.dtype(jax.numpy.bfloat16)
    specs = [
        ParamSpec("qk.weight", (6, 3), bfloat16, (TENSOR, None), Layout((Segment(4, 1), Segment(2, 1)), 1)),
        ParamSpec("embed.weight", (64, 3), FLOAT32, (TENSOR, None), padded_rows(5, 1)),
        norm("norm.weight", 3),
    ]
    names = expand({"qk.weight": ("q", "k"), "embed.weight": "embed", "norm.weight": Source("norm", plus_one)}, 1)
    progress: list[tuple[int, int]] = []
    qk, embed, weight = load_parameters(
        WatchedCheckpoint(arrays), specs, names, mesh, on_progress=lambda *at: progress.append(at)
    )
    np.testing.assert_array_equal(qk, np.concatenate([arrays["q"], arrays["k"]]).astype(bfloat16))
    np.testing.assert_array_equal(embed, np.pad(arrays["embed"], ((0, 59), (0, 0))))
    np.testing.assert_array_equal(weight, [1, 2, 3])
    assert qk.dtype == bfloat16
    assert qk.sharding.spec == P(TENSOR, None)
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_parameters_are_read_in_order_and_never_far_ahead(mesh):
    names = [f"p{i}" for i in range(12)]
    checkpoint = WatchedCheckpoint({name: np.full(4, i, np.float32) for i, name in enumerate(names)})

    def on_progress(done: int, total: int) -> None:
        assert len(checkpoint.reads) <= done + READ_AHEAD

    arrays = load_parameters(
        checkpoint, [norm(n) for n in names], expand({n: n for n in names}, 1), mesh, on_progress=on_progress
    )
    assert sorted(checkpoint.reads, key=names.index) == names
    assert all(abs(names.index(name) - at) <= READ_AHEAD for at, name in enumerate(checkpoint.reads))
    assert [int(a[0]) for a in arrays] == list(range(12))


def test_a_missing_tensor_is_named_with_the_nearest(mesh):
    checkpoint = WatchedCheckpoint({"model.norm.wieght": np.zeros(4, np.float32)})
    with pytest.raises(CheckpointError) as error:
        load_parameters(checkpoint, [norm("norm")], expand({"norm": "model.norm.weight"}, 1), mesh)
    assert str(error.value) == ("watched: tensor 'model.norm.weight' is missing; did you mean 'model.norm.wieght'?")
    assert checkpoint.reads == []


def test_a_tensor_nobody_reads_is_named_unless_it_is_known(mesh):
    arrays = {name: np.zeros(4, np.float32) for name in ("norm", "layers.0.self_attn.rotary_emb.inv_freq", "extra")}
    names = expand({"norm": "norm"}, 1)
    with pytest.raises(CheckpointError, match=r"tensor 'layers\.0\.self_attn\.rotary_emb\.inv_freq' is stored there"):
        load_parameters(WatchedCheckpoint(arrays), [norm("norm")], names, mesh)
    with pytest.raises(CheckpointError, match="tensor 'extra' is stored there, but this model does not use it"):
        load_parameters(WatchedCheckpoint(arrays), [norm("norm")], names, mesh, ignored=("*rotary_emb.inv_freq",))
    del arrays["extra"]
    load_parameters(WatchedCheckpoint(arrays), [norm("norm")], names, mesh, ignored=("*rotary_emb.inv_freq",))


@pytest.mark.parametrize("shape", [(3,), (5,), (4, 1)])
def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(mesh, shape):
    checkpoint = WatchedCheckpoint({"w": np.zeros(shape, np.float32)})
    with pytest.raises(CheckpointError) as error:
        load_parameters(checkpoint, [norm("p")], expand({"p": "w"}, 1), mesh)
    assert str(error.value) == f"watched: tensor 'w' is {shape}; expected (4,)"


def test_a_wrong_shape_inside_a_fused_parameter_is_the_tensors_own(mesh):
    checkpoint = WatchedCheckpoint({"q": np.zeros((4, 2), np.float32), "k": np.zeros((3, 2), np.float32)})
    spec = ParamSpec("qk", (6, 2), FLOAT32, (TENSOR, None), Layout((Segment(4, 1), Segment(2, 1)), 1))
    with pytest.raises(CheckpointError, match=r"tensor 'k' is \(3, 2\); expected \(2, 2\)"):
        load_parameters(checkpoint, [spec], expand({"qk": ("q", "k")}, 1), mesh)


def test_dummy_weights_have_the_right_shapes_and_norms_of_one(mesh):
    bfloat16 = np.dtype(jax.numpy.bfloat16)
    specs = [ParamSpec(f"layers.{i}.up", (96, 64), bfloat16, (TENSOR, None), None) for i in range(20)]
    specs.append(norm("norm", 64))
    arrays = dummy_parameters(specs, mesh, seed=3)
    again, other = dummy_parameters(specs, mesh, seed=3), dummy_parameters(specs, mesh, seed=4)
    for p, a, b in zip(specs, arrays, again, strict=True):
        assert (a.shape, a.dtype, a.sharding.spec) == (p.shape, p.dtype, P(*p.axes))
        np.testing.assert_array_equal(a, b)
    assert (np.asarray(arrays[-1]) == 1).all()
    drawn = [np.asarray(a, np.float32) for a in (*arrays[:-1], *other[:-1])]
    assert len({a.tobytes() for a in drawn}) == 40, "every layer and every seed has its own"
    assert all(0.9 < a.std() * 64**0.5 < 1.1 for a in drawn)


def test_dummy_weights_compile_once_for_all_layers(mesh, monkeypatch):
    compiled = []
    jit = jax.jit
    monkeypatch.setattr(jax, "jit", lambda f, **options: compiled.append(f) or jit(f, **options))
    dummy_parameters([ParamSpec(f"layers.{i}.up", (8, 4), FLOAT32, (TENSOR, None), None) for i in range(9)], mesh, 0)
    assert len(compiled) == 1


def test_quantized_dummy_weights_share_no_memory(monkeypatch):
    """Or a step of a large model would read one layer's weights over and over, out of the cache."""
    one = build_meshes(1)[0]
    kinds = (GgufKind("Q4_0", FLOAT32),)
    specs = [ParamSpec(f"layers.{i}.up", (32, 64), FLOAT32, (TENSOR, None), None, kinds) for i in range(3)]
    (packed,) = {leaf.array.shape for leaf in specs[0].leaves()}
    where_xla_takes_it = Room().take(int(np.prod(packed))).reshape(packed)
    monkeypatch.setattr(
        loader, "_pack", lambda *_: jax.tree.unflatten(jax.tree.structure(specs[0].abstract()), [where_xla_takes_it])
    )
    (a,), (b,), (c,) = (jax.tree.leaves(value) for value in dummy_parameters(specs, one, seed=0))
    assert len({array.unsafe_buffer_pointer() for array in (a, b, c)}) == 3


def convert_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to Q and K: the halves of every head's rows are interleaved."""
    out = np.empty_like(weight)
    dim = len(weight) // heads
    for head in range(heads):
        for pair in range(dim // 2):
            for half in range(2):
                out[head * dim + 2 * pair + half] = weight[head * dim + half * (dim // 2) + pair]
    return out


@pytest.mark.parametrize(("heads", "dim"), [(1, 4), (3, 8), (2, 64)])
def test_unpermute_rope_undoes_the_converters_permutation(heads, dim):
    weight = np.random.default_rng(0).normal(size=(heads * dim, 5)).astype(np.float32)
    stored = convert_permute(weight, heads)
    assert not np.array_equal(stored, weight)
    np.testing.assert_array_equal(unpermute_rope(dim)(stored), weight)
    np.testing.assert_array_equal(unpermute_rope(dim)(stored[:, 0]), weight[:, 0])


def test_expand_writes_out_the_layers():
    names = expand({"norm": "out", "layers.*.mlp": ("blk.*.gate", Source("blk.*.up", plus_one))}, 2)
    assert names == {
        "norm": ((Source("out"),),),
        "layers.0.mlp": ((Source("blk.0.gate"), Source("blk.0.up", plus_one)),),
        "layers.1.mlp": ((Source("blk.1.gate"), Source("blk.1.up", plus_one)),),
    }


QKV = AnyOf(("q", "k", "v"), "qkv")


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_split_and_fused_tensors_make_the_same_parameter(mesh, tp):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(rows, 3)).astype(np.float32) for rows in (8, 4, 4))
    layout = Layout((Segment(8, tp), Segment(4, min(tp, 2)), Segment(4, min(tp, 2))), tp)
    spec = ParamSpec("qkv", (layout.rows, 3), FLOAT32, (TENSOR, None), layout)
    split, fused = (
        load_parameters(WatchedCheckpoint(arrays), [spec], expand({"qkv": QKV}, 1), mesh)[0]
        for arrays in ({"q": q, "k": k, "v": v}, {"qkv": np.concatenate([q, k, v])})
    )
    np.testing.assert_array_equal(split, fused)
    first = np.asarray(split)[: layout.rows // tp]
    np.testing.assert_array_equal(first[: 8 // tp], q[: 8 // tp])
    np.testing.assert_array_equal(first[8 // tp :], np.concatenate([x[: 4 // min(tp, 2)] for x in (k, v)]))


def test_of_several_ways_the_one_that_lacks_least_is_missed(mesh):
    checkpoint = WatchedCheckpoint({"q": np.zeros((8, 3), np.float32), "k": np.zeros((4, 3), np.float32)})
    names = expand({"qkv": AnyOf("x.fused", ("q", "k", "v"))}, 1)
    with pytest.raises(CheckpointError, match="tensor 'v' is missing"):
        load_parameters(checkpoint, [ParamSpec("qkv", (16, 3), FLOAT32, (TENSOR, None), None)], names, mesh)


def test_a_fused_tensor_of_the_wrong_size_is_named(mesh):
    checkpoint = WatchedCheckpoint({"qkv": np.zeros((15, 3), np.float32)})
    layout = Layout((Segment(8, 1), Segment(4, 1), Segment(4, 1)), 1)
    spec = ParamSpec("qkv", (16, 3), FLOAT32, (TENSOR, None), layout)
    with pytest.raises(CheckpointError, match=r"tensor 'qkv' is \(15, 3\); expected \(16, 3\)"):
        load_parameters(checkpoint, [spec], expand({"qkv": QKV}, 1), mesh)


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_stack_and_split_along_their_second_axis(mesh, tp):
    rng = np.random.default_rng(0)
    gate, up = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)  # 3 experts of 4 rows
    each = {f"experts.{i}.{name}": w[i] for name, w in (("gate", gate), ("up", up)) for i in range(3)}
    whole = {"experts.gate_up": np.concatenate([gate, up], axis=1)}
    pattern = AnyOf((Source("experts.{}.gate", stack=3), Source("experts.{}.up", stack=3)), "experts.gate_up")
    layout = Layout((Segment(4, tp), Segment(4, tp)), tp, axis=1)
    spec = ParamSpec("w", (3, 8, 5), FLOAT32, (None, TENSOR, None), layout)
    half = 4 // tp
    expected = np.concatenate([w[:, i : i + half] for i in range(0, 4, half) for w in (gate, up)], axis=1)
    for arrays in (each, whole):
        (loaded,) = load_parameters(WatchedCheckpoint(arrays), [spec], expand({"w": pattern}, 1), mesh)
        np.testing.assert_array_equal(loaded, expected)


def test_a_transform_may_join_tensors(mesh):
    arrays = {"a.0": np.arange(4.0, dtype=np.float32), "b.0": np.arange(4.0, 6.0, dtype=np.float32)}
    names = expand({"p.*": Source("a.*", lambda a, b: np.concatenate([b, a]), also=("b.*",))}, 1)
    (loaded,) = load_parameters(WatchedCheckpoint(arrays), [norm("p.0", 6)], names, mesh)
    np.testing.assert_array_equal(loaded, [4, 5, 0, 1, 2, 3])


def test_skipped_tensors_are_named_in_the_log(mesh, caplog):
    arrays = {name: np.zeros(4, np.float32) for name in ("norm", "vision_tower.a", "vision_tower.b")}
    with caplog.at_level("INFO"):
        load_parameters(
            WatchedCheckpoint(arrays), [norm("norm")], expand({"norm": "norm"}, 1), mesh, ignored=("vision*",)
        )
    assert "2 tensors are not used: vision_tower.a, vision_tower.b" in caplog.text


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("stored", ["split", "fused"])
def test_segments_of_one_kind_are_one_weight_and_others_stand_by_themselves(mesh, tp, stored):
    """What a Q4_K_M file needs: q and k of one type, v of another, each laid out over the devices by itself."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(rows, 3)).astype(np.float32) for rows in (8, 4, 4))
    layout = Layout((Segment(8, tp), Segment(4, tp), Segment(4, 1)), tp)
    bfloat16 = np.dtype(jax.numpy.bfloat16)
    kinds = (DenseKind(bfloat16), DenseKind(bfloat16), DenseKind(FLOAT32))
    spec = ParamSpec("qkv", (layout.rows, 3), bfloat16, (TENSOR, None), layout, kinds)
    arrays = {"q": q, "k": k, "v": v} if stored == "split" else {"qkv": np.concatenate([q, k, v])}
    (loaded,) = load_parameters(WatchedCheckpoint(arrays), [spec], expand({"qkv": QKV}, 1), mesh)
    assert isinstance(loaded, Fused) and loaded.shape == (layout.rows, 3)
    qk, alone = loaded.parts
    assert isinstance(qk, Dense) and isinstance(alone, Dense)
    assert (qk.array.dtype, alone.array.dtype) == (bfloat16, FLOAT32)
    halves = [np.split(x, tp) for x in (q, k)]
    expected = np.concatenate([part for device in zip(*halves, strict=True) for part in device])
    np.testing.assert_array_equal(qk.array, expected.astype(bfloat16))
    np.testing.assert_array_equal(alone.array, np.concatenate([v] * tp))
    one = ParamSpec("qkv", (layout.rows, 3), bfloat16, (TENSOR, None), layout, (DenseKind(bfloat16),) * 3)
    (joined,) = load_parameters(WatchedCheckpoint(arrays), [one], expand({"qkv": QKV}, 1), mesh)
    assert isinstance(joined, Dense) and joined.array.shape == (layout.rows, 3)


class Blocks(DenseKind):
    block = 32


@pytest.mark.parametrize(("inputs", "tp", "refused"), [(128, 4, False), (96, 2, True), (96, 3, False), (64, 4, True)])
def test_a_shard_must_not_part_what_is_stored_together(inputs, tp, refused):
    spec = ParamSpec("layers.0.mlp.down.weight", (8, inputs), FLOAT32, (None, TENSOR), None, (Blocks(FLOAT32),))
    if not refused:
        spec.check_shards(tp)
        return
    with pytest.raises(CheckpointError, match=rf"^layers\.0\.mlp\.down\.weight: {inputs} inputs on {tp} devices"):
        spec.check_shards(tp)
