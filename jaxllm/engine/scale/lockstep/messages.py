"""What the processes of a group say to each other."""

from __future__ import annotations

import msgspec

from jaxllm.engine.core.keys import Key

BEAT_SECONDS = 1.0
"""How often each says that it lives, whatever else it does."""
SILENT_SECONDS = 8.0
"""A process that says nothing for this time is taken for dead, and the group ends: before JAX's heartbeat ends it."""
SILENT_START_SECONDS = 60.0
"""The same until it can run steps, if JAX's coordinator answers: it may load libraries without a word meanwhile."""
MEETING_SECONDS = 300.0
"""How long processes wait for each other at the start."""
CHECKED_STEPS = 16
"""One in so many steps that give tokens has them compared."""


class Hello(msgspec.Struct, tag=True):
    """Process `number`, on a machine; `agreement` is what must be the same in all, in words, by its name."""

    number: int
    host: str
    machine: str
    agreement: dict[str, str]


class MemberMemory(msgspec.Struct, tag=True):
    """What a process may plan with: see Platform."""

    memory_limit: int | None
    memory: int | None
    free_host_memory: int
    host_memory: int | None


class MemberPlan(msgspec.Struct, tag=True):
    """What the executables of its plan depend on, in words, by its name."""

    manifest: dict[str, str]


class TransferAddress(msgspec.Struct, tag=True):
    """Where others take the arrays that a process hands over."""

    address: str


class TransferAddresses(msgspec.Struct, tag=True):
    """Those of all processes, by their numbers, and the number of the first array that is handed over."""

    addresses: list[str]
    first: int


class Follows(msgspec.Struct, tag=True):
    """It has its weights, and runs steps from now on."""


class HasExecutable(msgspec.Struct, tag=True):
    key: Key


class TokenDigest(msgspec.Struct, tag=True):
    number: int
    digest: int


class MemberFailed(msgspec.Struct, tag=True):
    reason: str


class Leaving(msgspec.Struct, tag=True):
    """It was told to stop, and waits a while for process 0 to end the group."""

    reason: str


class Left(msgspec.Struct, tag=True):
    """It has heard of the end, and leaves in order."""


class Pulse(msgspec.Struct, tag=True):
    """The process lives."""


class Welcome(msgspec.Struct, tag=True):
    """All have come. JAX's coordinator is at `address`; of the `neighbours` on its machine this one is `place`."""

    address: str
    place: int
    neighbours: int


class Refused(msgspec.Struct, tag=True):
    reason: str


class Agreed(msgspec.Struct, tag=True):
    """The plan is the same."""


class RunStep(msgspec.Struct, tag=True):
    """Run this step, the `number`th, on the arrays that come with it."""

    number: int
    key: Key


class CompileNow(msgspec.Struct, tag=True):
    key: Key


class End(msgspec.Struct, tag=True):
    """The group ends: in order where there is no `reason`."""

    reason: str = ""


MemberAnswer = MemberMemory | TransferAddress | MemberPlan | Follows
FromFollower = Hello | MemberAnswer | HasExecutable | TokenDigest | MemberFailed | Leaving | Left | Pulse
FromLeader = Welcome | Refused | MemberMemory | TransferAddresses | Agreed | RunStep | CompileNow | Pulse | End


def difference(ours: dict[str, str], theirs: dict[str, str], process: str) -> str | None:
    """What `process` has otherwise than process 0, in a sentence; None where nothing is."""
    for name in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(name, "missing"), theirs.get(name, "missing")
        if here != there:
            return f"{name} is {there} in {process} and {here} in process 0: all must have the same"
    return None
