"""The page in Chromium, before a real server of a fake engine."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.serving.conftest import listen  # noqa: F401  a fixture
from tests.web.talker import Talker

if TYPE_CHECKING:
    from tests.web.driver import Driver  # skips who imports it where there is no playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = ["--no-sandbox", "--disable-gpu"]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of this directory only: pytest asks no other item's."""
    item.add_marker(pytest.mark.hardware)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any, listen: Callable[..., str]) -> Iterator[Callable[..., Driver]]:  # noqa: F811
    """Opens the page of a server in a browser profile of its own; nothing may be asked of anybody else, or go wrong.

    It is closed before the server is, which it may still ask something.
    """
    from tests.web.driver import Driver

    drivers: list[Driver] = []

    def start(url: str, **context: Any) -> Driver:
        settings = {"locale": "en-US", "viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"}
        driver = Driver(chromium.new_context(**settings | context), url)
        drivers.append(driver)
        return driver

    yield start
    for driver in drivers:
        driver.close()
    for driver in drivers:
        assert driver.foreign == []
        assert driver.complaints == []


@pytest.fixture
def talker() -> Talker:
    return Talker()


@pytest.fixture
def page(open_page: Callable[..., Driver], listen: Callable[..., str], talker: Talker) -> Driver:  # noqa: F811
    return open_page(listen(talker, reasoning_parser="think", served_model_name="talker"))
