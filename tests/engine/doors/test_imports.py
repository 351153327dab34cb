"""What a front door needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.programs


def test_a_front_door_does_without_jax():
    """It takes half a second and 100 MB. An engine in the same process imports it while other things are read."""
    program = (
        "import sys, jaxllm.serving.server, jaxllm.llm, jaxllm.engine.doors.async_llm; print('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
