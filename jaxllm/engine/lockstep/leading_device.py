"""The Device of process 0, which the others' follow."""

from __future__ import annotations

import threading
from typing import Any

from jaxllm.engine.device.device import Device
from jaxllm.engine.device.keys import Key
from jaxllm.engine.device.staged_device import StagedDevice
from jaxllm.engine.lockstep.leader import END_SECONDS, Leader


class LeadingDevice(Device):
    """Each step is sent to the other processes before it runs here."""

    def __init__(self, leader: Leader, *parts: Any):
        """`parts` are what a Device of the kind that leads is made of."""
        super().__init__(*parts)
        self._leader = leader
        self._between_steps = threading.Lock()

    def run(self, key: Key, *vectors: Any) -> Any:
        with self._between_steps:
            self._leader.send(key, vectors)
            output = super().run(key, *vectors)
            self._leader.note(output)
            return output

    def compile(self, key: Key) -> None:
        super().compile(key)
        self._leader.wait_for([key])

    def close(self) -> None:
        super().close()
        free = self._between_steps.acquire(timeout=END_SECONDS)  # a step that others run and this one does not hangs
        try:
            self._leader.end()
        finally:
            if free:
                self._between_steps.release()


class LeadingStages(LeadingDevice, StagedDevice):
    """The same of a model in stages, of which other processes have some or parts."""
