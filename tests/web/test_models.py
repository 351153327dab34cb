"""The menu of models: it shows how each is, and choosing one has it loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable

from jaxllm.errors import CheckpointError
from tests.serving.conftest import wait_for
from tests.serving.on_demand import Serve, Several, Starts, serve, starts
from tests.web.driver import Driver, expect

__all__ = ["serve", "starts"]

Open = Callable[..., Driver]


def opened(open_page: Open, server: Several) -> Driver:
    return open_page(server.url.removesuffix("/v1"))


def choose(page: Driver, name: str) -> None:
    page.page.get_by_role("combobox", name="Model").click()
    page.page.locator(".ant-select-item-option").filter(has_text=name).click()


def test_the_menu_shows_which_models_are_loaded_and_loads_them(open_page: Open, serve: Serve, starts: Starts) -> None:
    gate = starts.held["beta"] = threading.Event()
    server = serve("alpha", "beta")
    page = opened(open_page, server)
    header = page.page.locator("header")
    expect(header).to_contain_text("alpha not loaded")
    page.check_accessibility()
    page.say("Hello")
    expect(page.answers).to_contain_text("I am alpha.")
    expect(header).to_contain_text("alpha loaded")
    choose(page, "beta")
    alert = page.page.get_by_role("alert").filter(has_text="beta is being loaded.")
    expect(alert).to_contain_text("Loading beta: 3 / 7")
    expect(header).to_contain_text("beta loading 43 %")
    gate.set()
    expect(alert).to_have_count(0)
    expect(header).to_contain_text("beta loaded")
    page.page.get_by_role("combobox", name="Model").click()
    expect(page.page.locator(".ant-select-item-option").filter(has_text="alpha")).to_contain_text("not loaded")
    page.page.keyboard.press("Escape")
    page.say("And you?")
    expect(page.answers.last).to_contain_text("I am beta.")
    assert starts.events == ["start alpha", "started alpha", "stopped alpha", "start beta", "started beta"]


def test_a_model_that_cannot_be_loaded_is_told(open_page: Open, serve: Serve, starts: Starts) -> None:
    starts.broken["beta"] = CheckpointError("beta.gguf is cut short")
    page = opened(open_page, serve("alpha", "beta"))
    choose(page, "beta")
    expect(page.page.locator(".ant-message")).to_contain_text("beta is not loaded: its files are damaged")
    expect(page.page.locator("header")).to_contain_text("beta failed")
    page.say("Hello")
    expect(page.answers).to_contain_text("its files are damaged")


def test_a_message_waits_until_its_model_is_loaded(open_page: Open, serve: Serve, starts: Starts) -> None:
    gate = starts.held["alpha"] = threading.Event()
    page = opened(open_page, serve("alpha", "beta"))
    page.write("Hello")
    page.button("Send").click()
    expect(page.page.get_by_role("alert")).to_contain_text("alpha is being loaded.")
    gate.set()
    expect(page.answers).to_contain_text("I am alpha.")


def test_the_page_about_the_server_shows_all_models(open_page: Open, serve: Serve) -> None:
    server = serve("alpha", "beta")
    server.ask("alpha")
    wait_for(lambda: not server.models[0].calls)
    page = opened(open_page, server)
    page.page.get_by_role("link", name="Server").click()
    rows = page.page.get_by_role("main").get_by_role("listitem")
    expect(rows.filter(has_text="alpha")).to_contain_text("loaded, 256 tokens of context")
    expect(rows.filter(has_text="beta")).to_contain_text("not loaded")
