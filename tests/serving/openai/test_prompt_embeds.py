"""Prompts of vectors in text completions, in each format in which they may come."""

from __future__ import annotations

import base64
import pickle
import struct
from collections.abc import Callable
from io import BytesIO
from typing import Any
from zipfile import ZipFile

import ml_dtypes
import numpy as np
import pytest
from fastapi.testclient import TestClient
from safetensors.numpy import save

from jaxllm.errors import InvalidRequestError
from jaxllm.serving.openai.prompt_embeds import read_prompt_embeds
from tests.serving.fake_engine import HIDDEN_SIZE, FakeEngine
from tests.support.covers import covers

ROWS = np.random.default_rng(2).normal(size=(5, HIDDEN_SIZE)).astype(np.float32)


def by_numpy(rows: np.ndarray) -> bytes:
    file = BytesIO()
    np.save(file, rows)
    return file.getvalue()


def by_torch(rows: np.ndarray, strides: tuple[int, int] | None = None, kind: str = "FloatStorage") -> bytes:
    """The bytes of torch.save, as torch 2 writes them."""
    count, width = rows.shape
    numbers = [struct.pack("<BH", ord("M"), n) for n in (rows.size, 0, count, width, *(strides or (width, 1)))]
    size, offset, *shape = numbers
    pickled = (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\n" + kind.encode()
        + b"\nq\x02X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04" + size + b"tq\x05Q" + offset
        + shape[0] + shape[1] + b"\x86q\x06" + shape[2] + shape[3]
        + b"\x86q\x07\x89ccollections\nOrderedDict\nq\x08)Rq\ttq\nRq\x0b."
    )  # fmt: skip
    return zipped({"data.pkl": pickled, "byteorder": b"little", "data/0": rows.tobytes(), "version": b"3\n"})


def zipped(files: dict[str, bytes]) -> bytes:
    file = BytesIO()
    with ZipFile(file, "w") as archive:
        for name, data in files.items():
            archive.writestr(f"archive/{name}", data)
    return file.getvalue()


def sent(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("write", "rows"),
    [
        (by_numpy, ROWS),
        (by_numpy, ROWS.astype(np.float16)),
        (by_numpy, np.asfortranarray(ROWS.astype(np.float64))),
        (lambda rows: save({"x": rows}, {"by": "hand"}), ROWS),
        (lambda rows: save({"x": rows}), ROWS.astype(ml_dtypes.bfloat16)),
        (by_torch, ROWS),
        (lambda rows: by_torch(rows, kind="BFloat16Storage"), ROWS.astype(ml_dtypes.bfloat16)),
    ],
    ids=["npy", "half", "by columns", "safetensors", "bfloat16", "torch", "torch in bfloat16"],
)
def test_each_format_is_read(write: Callable[[np.ndarray], bytes], rows: np.ndarray) -> None:
    np.testing.assert_array_equal(read_prompt_embeds(sent(write(rows))), rows)


class Bad:
    def __reduce__(self) -> Any:
        return print, ("this was run",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("!", "cannot be read"),
        ("", "cannot be read"),
        (sent(b"junk that is none of them"), "cannot be read"),
        (sent(save({"x": ROWS, "y": ROWS})), "cannot be read"),
        (sent(by_numpy(ROWS.astype(np.int64))), "is of int64"),
        (sent(by_numpy(np.array([Bad()], dtype=object))), "cannot be read"),
        (sent(by_numpy(ROWS).replace(b"(5, ", b"(9, ")), "cannot be read"),
        (sent(save({"x": ROWS.astype(np.int32)})), "cannot be read"),
        (sent(by_torch(ROWS, (1, 5))), "cannot be read"),
        (sent(by_torch(ROWS, kind="LongStorage")), "cannot be read"),
        (sent(zipped({"data.pkl": pickle.dumps(Bad())})), "cannot be read"),
        (sent(zipped({"data.pkl": b"\x80\x02"})), "cannot be read"),
        (sent(by_torch(ROWS)[:90]), "cannot be read"),
    ],
)  # fmt: skip
def test_what_is_no_tensor_is_refused_and_never_run(capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said) as error:
        read_prompt_embeds(text)
    assert error.value.param == "prompt_embeds" and "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


@covers("CompletionRequest", "prompt_embeds")
def test_vectors_reach_the_engine_before_other_prompts(
    make_client: Callable[..., TestClient], engine: FakeEngine
) -> None:
    client = make_client(engine, enable_prompt_embeds=True)
    both = [sent(by_numpy(ROWS)), sent(by_torch(ROWS[:2]))]
    response = client.post("/v1/completions", json={"prompt": "Hi", "prompt_embeds": both})
    assert response.status_code == 200, response.text
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1, 2]
    assert [len(ids) for ids, *_ in engine.seen[:2]] == [5, 2]
    first, second, none = engine.patchings
    np.testing.assert_array_equal(first.rows, ROWS)
    np.testing.assert_array_equal(second.rows, ROWS[:2])
    assert none is None
    alone = client.post("/v1/completions", json={"prompt_embeds": both[0], "max_tokens": 3})
    assert alone.json()["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("fields", "name", "said"),
    [
        ({"prompt_embeds": sent(by_numpy(ROWS)), "echo": True}, "echo", "is not available with prompt_embeds"),
        (
            {"prompt_embeds": sent(by_numpy(ROWS[:, :3]))},
            "prompt_embeds",
            f"[5, 3]; it must be [tokens, {HIDDEN_SIZE}]",
        ),
        ({"prompt_embeds": "!"}, "prompt_embeds", "cannot be read"),
        ({"prompt_embeds": []}, "prompt", "prompt is required"),
        ({}, "prompt", "prompt is required"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    make_client: Callable[..., TestClient], engine: FakeEngine, fields: dict[str, Any], name: str, said: str
) -> None:
    response = make_client(engine, enable_prompt_embeds=True).post("/v1/completions", json=fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, name)
    assert said in error["message"]


def test_a_server_takes_none_unless_it_is_told_to(client: TestClient) -> None:
    response = client.post("/v1/completions", json={"prompt_embeds": sent(by_numpy(ROWS))})
    assert response.status_code == 400
    assert "needs --enable-prompt-embeds" in response.json()["error"]["message"]
