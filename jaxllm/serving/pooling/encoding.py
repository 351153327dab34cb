"""How vectors are written: as numbers, or as the base64 of their bytes."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np
from pydantic import model_validator

from jaxllm.serving.http.request_model import RequestModel, refuse

EmbedDtype = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
DTYPES: Mapping[EmbedDtype, Any] = {
    "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


class EncodingFields(RequestModel):
    """How vectors are written."""

    encoding_format: Literal["float", "base64"] = "float"
    """Numbers, or base64 of little-endian float32."""
    embed_dtype: EmbedDtype | None = None
    """With base64, the type of its numbers instead of float32."""
    endianness: Literal["native", "big", "little"] | None = None
    """With base64, the order of each number's bytes; little by default, and native is that of the server."""

    @model_validator(mode="after")
    def _bytes_only(self) -> EncodingFields:
        for name in ("embed_dtype", "endianness"):
            if getattr(self, name) is not None and self.encoding_format != "base64":
                raise refuse(f"{name} needs encoding_format to be 'base64'", name)
        return self

    def encoded(self, vector: np.ndarray) -> list[float] | str:
        """A vector of float32 as asked for; values beyond a narrower type's range are its infinity or NaN."""
        if self.encoding_format == "float":
            return vector.tolist()
        with np.errstate(over="ignore"):
            values = vector.astype(DTYPES[self.embed_dtype or "float32"])
        order = {"native": "=", "big": ">"}.get(self.endianness or "little", "<")
        octets = values.view(f"u{values.itemsize}").astype(f"{order}u{values.itemsize}")
        return base64.b64encode(octets.tobytes()).decode()
