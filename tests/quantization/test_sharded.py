"""Products of every kind of weight are the same on any number of devices."""

from __future__ import annotations

import jax
import numpy as np

from tests.quantization.blocks import stored
from tests.quantization.run_sharded import ROWS, kinds, values
from tests.support.devices import over_devices


def test_products_over_several_devices(tmp_path):
    found = over_devices(4, "tests.quantization.run_sharded", tmp_path / "products.npz")
    *tensors, x = values()
    for scheme, kind in kinds().items():
        weight = kind.pack([stored(np.concatenate(tensors))], None)
        whole = x @ np.asarray(jax.jit(lambda w: w.dequantize())(weight)).T
        first, second = whole[:, : ROWS[0]], whole[:, ROWS[0] :]
        for tp in (2, 4):
            halves = np.repeat(np.split(second, 2, axis=1), tp // 2, axis=0)
            devices = zip(np.split(first, tp, axis=1), halves, strict=True)
            expected = np.concatenate([part for device in devices for part in device], axis=1)
            rounds_inputs = scheme == "w8a8" or (scheme.endswith("in tiles") and scheme != "fp8 in tiles")
            atol = 1.0 if rounds_inputs else 1e-3  # each device's with scales of its own
            np.testing.assert_allclose(found[f"{scheme}:{tp}:rows"], expected, atol=atol, err_msg=f"{scheme} {tp}")
            np.testing.assert_allclose(found[f"{scheme}:{tp}:inputs"], whole, atol=atol, err_msg=f"{scheme} {tp}")
