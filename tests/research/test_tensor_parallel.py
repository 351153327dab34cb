"""Two devices show what one shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.research import inside
from tests.support.devices import over_devices

pytestmark = pytest.mark.programs


def test_two_devices_show_what_one_shows(tmp_path: Path) -> None:
    found = over_devices(2, inside.__name__, tmp_path / "two.npz")
    for name in inside.MODELS:
        expected = inside.shown(name, tmp_path, 1)
        assert {key.split("/")[1] for key in found if key.startswith(name)} == expected.keys()
        for key, array in expected.items():
            np.testing.assert_allclose(found[f"{name}/{key}"], array, atol=1e-4, rtol=1e-4, err_msg=f"{name} {key}")
    for key, array in inside.shared_keys(tmp_path, 1).items():
        assert array.shape[1] == 1
        np.testing.assert_allclose(found[f"shared/{key}"], array, atol=1e-4, rtol=1e-4, err_msg=key)
