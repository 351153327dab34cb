"""What a person does on the page, in the words of the page's own labels."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; make test-web does that")
expect = playwright.expect

ROOT = Path(__file__).parents[2]
AXE = ROOT / "web/node_modules/axe-core/axe.min.js"
PICTURES = ROOT / "docs/images"


class Driver:
    """One browser profile with one tab.

    Attributes:
        page: Playwright's own page, for what has no word here.
        foreign: requests that would have left for another server.
        complaints: errors and refusals that the browser's console has shown.
    """

    def __init__(self, context: Any, url: str):
        self.url = url
        self.context = context
        self.foreign: list[str] = []
        self.complaints: list[str] = []
        self.expected: list[str] = []
        """Parts of complaints that a test brings about itself."""
        context.on("request", lambda request: self._note(request.url))
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page = context.new_page()
        self.page.set_default_timeout(30_000)  # the machine may be busy
        self.page.on("console", self._listen)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(url)

    def _note(self, url: str) -> None:
        if not url.startswith((self.url, "data:", "blob:")):
            self.foreign.append(url)

    def _listen(self, message: Any) -> None:
        if message.type == "error" and not any(part in message.text for part in self.expected):
            self.complaints.append(message.text)

    def close(self) -> None:
        self.context.close()

    @property
    def answers(self) -> Any:
        return self.page.get_by_role("article", name="Assistant")

    @property
    def turns(self) -> Any:
        return self.page.get_by_role("article")

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    def new_chat(self) -> None:
        """Begin a conversation: it is shown when this returns."""
        self.page.get_by_role("link", name="New chat").click()
        expect(self.page).to_have_url(f"{self.url}/#/")
        expect(self.turns).to_have_count(0)

    def write(self, text: str) -> None:
        self.page.get_by_placeholder("Write a message").fill(text)

    def say(self, text: str) -> None:
        """Send a message and wait for the whole answer."""
        self.write(text)
        self.button("Send").click()
        self.wait()

    def wait(self) -> None:
        """Until no answer is under way."""
        self.answers.last.wait_for()
        self.page.locator("[aria-busy=true]").wait_for(state="detached")

    def check_accessibility(self) -> None:
        """axe-core finds nothing, and what it cannot decide is not looked at."""
        if not AXE.exists():
            pytest.skip("axe-core is not installed: npm ci in web/")
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate("axe.run(document).then(result => result.violations)")
        lines = [f"{one['id']}: {one['help']}: {node['html'][:200]}" for one in found for node in one["nodes"]]
        assert not lines, "\n".join(lines)

    def picture(self, name: str) -> None:
        """With PICTURES=1 in the environment, a screenshot for docs/serving.md."""
        if os.environ.get("PICTURES"):
            self.page.screenshot(path=PICTURES / f"{name}.png")
