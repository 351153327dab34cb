"""GGUF files: opened, parsed, every tensor read; and their tokenizers."""

from __future__ import annotations

import struct
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxllm import EngineConfig
from jaxllm.engine.start.blueprint import make_blueprint
from jaxllm.engine.start.platform import Platform
from jaxllm.errors import CheckpointError
from jaxllm.models.options import BuildOptions
from jaxllm.models.registry import abstract_model, model_spec
from jaxllm.models.tasks import read_tasks
from jaxllm.sharding.mesh import build_meshes
from jaxllm.text.tokenizer import load_tokenizer
from jaxllm.weights import open_checkpoint
from jaxllm.weights.gguf_file import read_header
from jaxllm.weights.loader import load_parameters
from tests.fuzz.harness import COUNTS, check_message, fuzz
from tests.fuzz.mutants import JUNK, mutate_bytes, pick
from tests.reference.tiny_gguf import GGUF_MODELS, write_gguf

ROOMY = Platform("cpu", 1, 2**40, 2**40)
SHARE_PLANNED = 0.01
MODELS = ("llama_gqa", "mixtral", "phi", "phi3_longrope_long", "gemma3_small", "deepseek_v2", "qwen2_moe", "stablelm")


class Head:
    """A GGUF file taken apart: metadata as (key, type, bytes), the tensor table, and the data."""

    def __init__(self, data: bytes, path):
        header = read_header(path, skip=())
        reader = gguf.GGUFReader(path)
        self.pairs = [
            (field.name, int(field.types[0]), b"".join(bytes(part) for part in field.parts[3:]))
            for field in reader.fields.values()
            if not field.name.startswith("GGUF.")
        ]
        start = reader.data_offset
        self.tensors = [
            (name, tensor.shape[::-1], int(GGMLQuantizationType[tensor.dtype]), tensor.offset - start)
            for name, tensor in header.tensors.items()
        ]
        self.data = data[start:]


def assembled(pairs, tensors, data: bytes, counts=None) -> bytes:
    """The file of these parts, whatever they say."""
    n_tensors, n_pairs = counts or (len(tensors), len(pairs))
    out = [b"GGUF", struct.pack("<IQQ", 3, n_tensors, n_pairs)]
    for key, kind, value in pairs:
        out += [string(key), struct.pack("<I", kind), value]
    for name, dims, kind, offset in tensors:
        out += [string(name), struct.pack("<I", len(dims)), *(struct.pack("<Q", d) for d in dims)]
        out.append(struct.pack("<IQ", kind, offset))
    head = b"".join(out)
    return head + bytes(-len(head) % 32) + data


def string(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(encoded)) + encoded


def any_value(rng: np.random.Generator) -> tuple[int, bytes]:
    """A metadata value of a random type."""
    big = pick(rng, 0, 1, 2, 7, 2**31 - 1, 2**32 - 1)
    real = pick(rng, 0.0, -1.0, 1e-30, 1e30, np.nan, np.inf)
    choices: list[tuple[int, bytes]] = [
        (4, struct.pack("<I", big)), (5, struct.pack("<i", -1)), (10, struct.pack("<Q", 2**64 - 1)),
        (11, struct.pack("<q", -(2**63))), (6, struct.pack("<f", real)), (12, struct.pack("<d", real)),
        (7, b"\x01"), (8, string(str(pick(rng, *JUNK)))), (8, struct.pack("<Q", 2**60)),
        (9, struct.pack("<IQ", 4, 2**60)), (9, struct.pack("<IQ", 8, 2**60)), (9, struct.pack("<IQ", 9, 1)),
        (9, struct.pack("<IQ", 4, 0)), (9, struct.pack("<IQ", 4, 2) + struct.pack("<II", big, 3)),
        (9, struct.pack("<IQ", 6, 1) + struct.pack("<f", real)), (9, struct.pack("<IQ", 8, 1) + string("a")),
        (13, b""), (2**32 - 1, b""),
    ]  # fmt: skip
    return pick(rng, *choices)


def mutate_head(rng: np.random.Generator, head: Head) -> bytes:
    pairs, tensors, counts = list(head.pairs), list(head.tensors), None
    for _ in range(rng.choice([1, 1, 2])):
        at, which = int(rng.integers(len(pairs))), int(rng.integers(len(tensors)))
        name, dims, kind, offset = tensors[which]
        match rng.choice(
            ["value", "value", "value", "key", "drop", "dims", "kind", "offset", "name", "gone", "counts"]
        ):
            case "value":
                pairs[at] = (pairs[at][0], *any_value(rng))
            case "key":
                key = rng.choice(["general.alignment", "split.count", "general.architecture", pairs[0][0]])
                pairs.append((str(key), *any_value(rng)))
            case "drop":
                del pairs[at]
            case "dims":
                most = 2**64 - 1  # where a tensor is changed twice
                changed = [pick(rng, 0, 1, min(d + 1, most), min(d * 2, most), 2**32, 2**60, most) for d in dims]
                tensors[which] = (
                    name,
                    tuple(changed[: rng.integers(len(changed) + 1)]) * rng.integers(1, 4),
                    kind,
                    offset,
                )
            case "kind":
                tensors[which] = (name, dims, int(rng.integers(0, 45)), offset)
            case "offset":
                tensors[which] = (name, dims, kind, pick(rng, 0, 1, 32, 2**40, 2**63, 2**64 - 1))
            case "name":
                tensors[which] = (pick(rng, "", "a\nb", tensors[0][0], "x" * 100_000), dims, kind, offset)
            case "gone":
                if len(tensors) > 1:
                    del tensors[which]
            case "counts":
                counts = tuple(pick(rng, 0, 1, 10**6, 2**60, 2**64 - 1) for _ in range(2))
    return assembled(pairs, tensors, head.data, counts)


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> list[tuple[bytes, Head]]:
    directory = tmp_path_factory.mktemp("gguf")
    assert set(MODELS) <= set(GGUF_MODELS)
    files = [write_gguf(name, directory / f"{name}.gguf") for name in MODELS]
    return [(file.read_bytes(), Head(file.read_bytes(), file)) for file in files]


def test_the_parts_make_the_file_again(heads):
    for data, head in heads:
        assert assembled(head.pairs, [(n, d, k, o) for n, d, k, o in head.tensors], head.data) == data


@COUNTS
def test_a_gguf_file_is_read_or_refused(count, tmp_path, heads):
    path = tmp_path / "model.gguf"

    def attempt(rng: np.random.Generator) -> None:
        data, head = heads[rng.integers(len(heads))]
        path.write_bytes(mutate_bytes(rng, data[:8192]) + data[8192:] if rng.random() < 0.4 else mutate_head(rng, head))
        checkpoint = open_checkpoint(path)
        total = 0
        for name, info in checkpoint.tensors.items():
            array = checkpoint.read(name).expand()
            assert array.shape == info.shape
            total += array.nbytes
        assert total <= 64 * path.stat().st_size  # no type has less than half a bit a weight
        model_spec(checkpoint)
        read_tasks(checkpoint)
        if rng.random() < SHARE_PLANNED:
            make_blueprint(EngineConfig(model=str(path)), checkpoint, ROOMY)
        checkpoint.close()

    refused = fuzz(count, attempt)
    assert count / 4 < refused < count


# Tokenizers


def write_tokenizer(path, **fields: Any) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        prefix = "tokenizer." if name.startswith("chat_template") else "tokenizer.ggml."
        add[type(value)](prefix + name, value)
    writer.add_tensor("x", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> list[tuple[bytes, Head]]:
    directory = tmp_path_factory.mktemp("gguf-tokenizers")
    common = {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True, "chat_template": "{{ messages[0].content }}"}
    files = [directory / "bpe.gguf", directory / "spm.gguf"]
    tokens = ["<s>", "</s>", "a", "b", "ab", "Ġ", "Ġa"]
    kinds = [3, 3, 1, 1, 1, 1, 4]
    write_tokenizer(
        files[0], model="gpt2", pre="llama-bpe", tokens=tokens, token_type=kinds, merges=["a b", "Ġ a"], **common
    )
    pieces = ["<s>", "</s>", "<unk>", "▁", "a", "b", "▁a", "ab"]
    scores = [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0]
    kinds = [3, 3, 2, 1, 1, 1, 1, 1]
    write_tokenizer(files[1], model="llama", tokens=pieces, scores=scores, token_type=kinds, **common)
    return [(file.read_bytes(), Head(file.read_bytes(), file)) for file in files]


@COUNTS
def test_a_gguf_tokenizer_is_made_or_refused(count, tmp_path, tokenizers):
    path = tmp_path / "model.gguf"

    def attempt(rng: np.random.Generator) -> None:
        data, head = tokenizers[rng.integers(len(tokenizers))]
        if rng.random() < 0.5:
            path.write_bytes(mutate_bytes(rng, data[:-128]) + data[-128:])
        else:
            pairs = list(head.pairs)
            at = int(rng.integers(1, len(pairs)))
            pairs[at] = (pairs[at][0], *any_value(rng))
            path.write_bytes(assembled(pairs, head.tensors, head.data))
        tokenizer = load_tokenizer(path, cache_dir=tmp_path / "cache")
        ids = tokenizer.encode("ab a é 12 </s>")
        tokenizer.decode(ids)
        assert all(token < tokenizer.vocab_size for token in tokenizer.eos_token_ids)

    refused = fuzz(count, attempt)
    assert count / 4 < refused < count


@pytest.mark.parametrize(
    ("pair", "says"),
    [
        (("general.architecture", 4, struct.pack("<I", 5)), "general.architecture is 5; accepted is a string"),
        (("general.alignment", 4, bytes(4)), "general.alignment is 0; accepted is an integer from 1"),
        (("split.count", 8, string("two")), "split.count is 'two'; accepted is an integer"),
        (("llama.block_count", 8, string("3")), "llama.block_count is '3'; accepted is an integer from 1 to 1024"),
        (("llama.block_count", 4, struct.pack("<I", 2**32 - 1)), "llama.block_count is 4294967295; accepted is"),
        (("llama.rope.freq_base", 6, struct.pack("<f", np.nan)), "llama.rope.freq_base is nan; accepted is a number"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_do(pair, says, tmp_path, heads):
    _, head = heads[0]
    path = tmp_path / "model.gguf"
    kept = [entry for entry in head.pairs if entry[0] != pair[0]]
    path.write_bytes(assembled([*kept, pair], head.tensors, head.data))
    with pytest.raises(CheckpointError) as caught:
        model_spec(open_checkpoint(path))
    check_message(str(caught.value))
    assert says in str(caught.value)


@pytest.mark.parametrize("dims", [(28, 20, 4), (2240,), (1, 20, 28, 4)])
def test_parts_of_latent_attention_that_do_not_fit(dims, tmp_path, heads):
    _, head = heads[MODELS.index("deepseek_v2")]
    path = tmp_path / "model.gguf"
    changed = [(n, dims if n == "blk.0.attn_k_b.weight" else d, k, o) for n, d, k, o in head.tensors]
    path.write_bytes(assembled(head.pairs, changed, head.data))
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint)
    _, params = abstract_model(spec, BuildOptions())
    with pytest.raises(CheckpointError, match="attn_k_b and attn_v_b are of shapes"):
        load_parameters(checkpoint, params, spec.names, build_meshes(1)[0], ignored=spec.ignored)


def test_tensors_that_share_bytes(tmp_path, heads):
    _, head = heads[0]
    path = tmp_path / "model.gguf"
    path.write_bytes(assembled(head.pairs, [(n, d, k, 0) for n, d, k, _ in head.tensors], head.data))
    with pytest.raises(CheckpointError, match="share bytes"):
        open_checkpoint(path)
