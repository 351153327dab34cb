"""What the loop has copied to the host beside its steps: what leaves the devices, is handed on, or is to outlive it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxllm.engine.device.handle import LeavingPages
from jaxllm.engine.device.runner import Runner
from jaxllm.engine.offload.tiers import PageTiers
from jaxllm.engine.page_pool import PrefixNode
from jaxllm.engine.request import Request


class HostCopies:
    """From the devices to what is below them, if anything is."""

    def __init__(self, tiers: PageTiers | None, runner: Runner):
        self._tiers = tiers
        self._runner = runner

    def keep(self, leaving: Sequence[LeavingPages]) -> None:
        """Keep in host memory what is on its way there."""
        for part in leaving:
            assert self._tiers is not None, "without tiers no page is copied"
            self._tiers.keep(part.digests, part.contents)

    def hand_on(self, request: Request, root: PrefixNode) -> None:
        """Copy the full pages of a prompt, and its state, to host memory, where other servers find them."""
        if request.hands_on and self._tiers is not None:
            prompt = request.token_ids[: request.num_prompt]
            self.keep(self._runner.read_pages(self._tiers.to_hand_on(root, prompt, request.pages)))

    @property
    def has_unsaved(self) -> bool:
        """Whether something is to be copied to disk once nobody waits for anything."""
        return self._tiers is not None and self._tiers.has_unsaved

    def save(self) -> None:
        """Copy some pages or a state to disk that are not there yet; one step's time at most, as a request may come."""
        if self._tiers is None:
            return
        for part in self._runner.read_pages(self._tiers.take_unsaved()):
            self._tiers.save(part.digests, part.contents)
        self._tiers.save_from_host()
