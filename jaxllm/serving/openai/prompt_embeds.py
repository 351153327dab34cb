"""Prompts of vectors instead of tokens: base64 of a tensor as torch.save, NumPy or safetensors write one."""

from __future__ import annotations

import base64
import math
import pickletools
from io import BytesIO
from typing import Any
from zipfile import BadZipFile, ZipFile

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, deserialize

from jaxllm.errors import InvalidRequestError

MOST_BYTES = 2**28
"""Of the files in torch.save's, unpacked."""
_DTYPES: dict[str, Any] = {
    "F16": np.float16, "F32": np.float32, "F64": np.float64, "BF16": ml_dtypes.bfloat16,
    "Half": np.float16, "Float": np.float32, "Double": np.float64, "BFloat16": ml_dtypes.bfloat16,
}  # fmt: skip
"""By safetensors' names, and those of torch's storages."""
_ABOUT_MEMORY = ("PROTO", "FRAME", "PUT", "BINPUT", "LONG_BINPUT")
"""Operations of a pickle whose arguments say nothing of what is in it."""


def read_prompt_embeds(text: str) -> np.ndarray:
    """The tensor of floating-point numbers that `text` is. Nothing in it is run.

    Raises:
        InvalidRequestError: it is none; `param` is prompt_embeds.
    """
    try:
        data = base64.b64decode(text, validate=True)
        if data[:2] == b"PK":
            found = _from_torch(data)
        else:
            found = _from_numpy(data) if data[:6] == b"\x93NUMPY" else _from_safetensors(data)
    except (ValueError, KeyError, TypeError, IndexError, EOFError, BadZipFile, SafetensorError) as error:
        accepted = "base64 of one tensor by torch.save (contiguous, on the CPU), numpy.save or safetensors"
        raise _refused(f"cannot be read ({type(error).__name__}); it must be {accepted}") from None
    if found.dtype not in [*map(np.dtype, _DTYPES.values())]:
        raise _refused(f"is of {found.dtype}; it must be of float16, bfloat16, float32 or float64")
    return found


def _refused(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"prompt_embeds {problem}", "prompt_embeds")


def _from_safetensors(data: bytes) -> np.ndarray:
    [(_, tensor)] = deserialize(data)
    return np.frombuffer(tensor["data"], _DTYPES[tensor["dtype"]]).reshape(tensor["shape"])


def _from_numpy(data: bytes) -> np.ndarray:
    stream, form = BytesIO(data), np.lib.format
    header = form.read_array_header_1_0 if form.read_magic(stream) == (1, 0) else form.read_array_header_2_0
    shape, by_columns, dtype = header(stream)
    return np.frombuffer(data[stream.tell() :], dtype).reshape(shape, order="F" if by_columns else "C")


def _from_torch(data: bytes) -> np.ndarray:
    """A tensor in a zip file, whose pickle is only looked through: the constants in it say all there is to know."""
    with ZipFile(BytesIO(data)) as archive:
        [name] = (name for name in archive.namelist() if name.endswith("data.pkl"))
        if sum(info.file_size for info in archive.infolist()) > MOST_BYTES:
            raise _refused(f"is more than {MOST_BYTES} bytes, unpacked")
        operations = pickletools.genops(archive.read(name))
        match [word for code, word, _ in operations if word is not None and code.name not in _ABOUT_MEMORY]:
            case ["torch._utils _rebuild_tensor_v2", "storage", str(kind), str(key), str(), int(), 0, *numbers, str()]:
                shape: list[Any] = numbers[: len(numbers) // 2]
                strides = numbers[len(numbers) // 2 :]
                if strides != [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]:
                    raise ValueError("a view of something larger")
                dtype = _DTYPES[kind.removeprefix("torch ").removesuffix("Storage")]
                stored = np.frombuffer(archive.read(f"{name.removesuffix('data.pkl')}data/{key}"), dtype)
                return stored[: math.prod(shape)].reshape(shape)
    raise ValueError("something else than one tensor")
