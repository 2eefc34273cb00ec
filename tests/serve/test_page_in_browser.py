"""The page to look at in a real browser, without a window."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.serve.browser import Browser, Page, find_browser, running_browser
from tests.serve.running import RunningServer, running

import aquifer

DEMO = Path(aquifer.__file__).parent / "bundled" / "demo"
MARKUP = "<b><u>x</u></b>"

_FAKE_OPERATIONS = """
const realFetch = window.fetch;
window.asked = [];
window.fetch = async (address, options = {}) => {
  if (!String(address).startsWith("models")) return realFetch(address, options);
  window.asked.push([options.method ?? "GET", String(address), options.headers]);
  if (address === "models") return new Response("{}");
  const body = JSON.stringify({error: {message: "<b>it is busy</b>"}});
  return String(address).endsWith("/pin") ? new Response(body, {status: 409}) : new Response("{}");
};
"""
"""A part of the server in its page: operations on models, of which one is refused."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("there is no Chromium here: apt-get install chromium")
    with running_browser(program) as browser:
        yield browser


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The demo model, and one with other weights, in memory for one and a half."""
    other = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(DEMO, other)
    file = other / "model.safetensors"
    save_file({name: tensor * 1.001 for name, tensor in load_file(file).items()}, file)
    models = ["demo", f"{MARKUP}={other}"]
    options = ["--port", "0", "--memory", "16M", "--max-model-len", "256"]
    with running(["-m", "aquifer", "serve", *models, *options]) as server:
        yield server
    assert server.problems == ""


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with browser.page() as page:
        yield page


def complete(server: RunningServer, model: str, num_tokens: int) -> None:
    body = {"model": model, "prompt": "Once", "max_tokens": num_tokens, "ignore_eos": True}
    status, answer, _ = server.call("POST", "/v1/completions", body)
    assert status == 200, answer


def test_it_shows_the_server_as_it_is(small_server: RunningServer, page: Page):
    page.open(small_server.url)
    page.wait_for("document.querySelector('#status').textContent === 'live'")
    names = page.evaluate(
        "[...document.querySelectorAll('#models tr')].map(row => row.dataset.model)"
    )
    assert names == ["demo", MARKUP]
    shown = page.evaluate(
        "[...document.querySelectorAll('#models .name')].map(name => name.textContent)"
    )
    assert shown == names, "a name is text"
    assert page.evaluate("document.querySelectorAll('b, u').length") == 0
    assert page.text("tr[data-model=demo] .pill") == "resident"
    page.wait_for("document.querySelectorAll('#legend li').length > 1")
    assert "demo · weights" in page.text("#legend")
    assert page.evaluate("document.querySelectorAll('#maps rect').length") > 1

    before = page.text("#generated-all")
    complete(small_server, "demo", 20)
    page.wait_for(f"document.querySelector('#generated-all').textContent !== {before!r}")
    page.wait_for("document.querySelector('#completions-all').textContent !== '0 since the start'")

    complete(small_server, MARKUP, 5)
    page.wait_for("document.querySelectorAll('#log .swatch').length > 0")
    assert "demo · weights" in page.text("#log")
    assert f"{MARKUP} · weights" in page.text("#log")
    page.wait_for("document.querySelector('tr[data-model=demo] .pill').textContent !== 'resident'")
    assert page.problems == []


def test_it_fits_narrow_and_wide_windows(small_server: RunningServer, page: Page):
    page.open(small_server.url)
    backgrounds = set()
    for scheme in ("light", "dark"):
        for width in (340, 780, 900, 1060, 1061, 1280):
            page.show_as(scheme, width, 800)
            page.wait_for("document.querySelectorAll('#maps rect').length > 1")
            assert page.evaluate("document.documentElement.scrollWidth") == width
            overflowing = page.evaluate(
                "[...document.querySelectorAll('.card')]"
                ".filter(card => card.scrollWidth > card.clientWidth).length"
            )
            assert overflowing == 0, width
            backgrounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2
    assert page.problems == []


def test_it_shows_each_device(page: Page, tmp_path: Path):
    """Two engines, each with room for one model and a half of three."""
    others = [shutil.copytree(DEMO, tmp_path / name) for name in ("b", "c")]
    for number, folder in enumerate(others, 2):
        file = folder / "model.safetensors"
        save_file({name: tensor * number for name, tensor in load_file(file).items()}, file)
    command = ["-m", "aquifer", "serve", "a=demo", *(f"{each.name}={each}" for each in others)]
    options = ["--port", "0", "--devices", "cpu,cpu", "--memory", "16M", "--max-model-len", "256"]
    with running([*command, *options]) as server:
        page.open(server.url)
        page.wait_for("document.querySelectorAll('#maps [data-device]').length === 2")
        for _ in range(2):
            for model in "abc":
                complete(server, model, 3)
        page.wait_for("document.querySelectorAll('#log .swatch').length > 0")
        assert " on cpu:" in page.text("#log")
        places = "[...document.querySelectorAll('tr[data-model=c] .places .quiet')]"
        assert page.evaluate(f"{places}.map(name => name.textContent)") == ["cpu:0", "cpu:1"]
        _, memory, _ = server.call("GET", "/memory")
        for device, of_device in memory["devices"].items():
            shown = f"#maps [data-device='{device}']"
            assert page.text(f"{shown} strong") == device
            assert page.evaluate(f"document.querySelectorAll(`{shown} rect`).length") > 1
            page.wait_for(
                f"document.querySelector(`{shown} .number`).textContent"
                f".endsWith(` of {of_device['budget'].replace('.00', '.0')}, "
                f"${{share({of_device['used_bytes']}, {of_device['budget_bytes']})}}`)"
            )
        for scheme in ("light", "dark"):
            for width in (340, 1061, 1280):
                page.show_as(scheme, width, 800)
                assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.problems == []


def test_buttons_operate_on_models(small_server: RunningServer, page: Page):
    page.command("Page.addScriptToEvaluateOnNewDocument", source=_FAKE_OPERATIONS)
    page.open(small_server.url)
    row = f'#models tr[data-model="{MARKUP}"]'
    page.wait_for(f"document.querySelector({row + ' [aria-label^=Pin]'!r})?.disabled === false")
    page.click(f"{row} [aria-label^=Pin]")
    page.wait_for(f"document.querySelector({row + ' .problem'!r}).textContent !== ''")
    assert page.text(f"{row} .problem") == "<b>it is busy</b>"
    assert page.evaluate("asked") == [
        ["GET", "models", {}],
        ["POST", "models/%3Cb%3E%3Cu%3Ex%3C%2Fu%3E%3C%2Fb%3E/pin", {}],
    ]
    state = page.text(f"{row} .pill")
    of_no_use = {"resident": "Load", "registered": "Unload"}.get(state)
    if of_no_use is not None:
        assert page.evaluate(f"document.querySelector(`{row} [aria-label^={of_no_use}]`).disabled")
    assert page.problems == []


def test_a_model_is_added_and_removed(page: Page, tmp_path: Path):
    added = shutil.copytree(DEMO, tmp_path / "added")
    command = ["-m", "aquifer", "serve", "demo", "--port", "0", "--memory", "16M"]
    with running([*command, "--max-model-len", "256"]) as server:
        page.open(server.url)
        page.wait_for("document.querySelector('#status').textContent === 'live'")
        for text in (f"b={added}x", f"b={added}"):
            page.evaluate(f"document.querySelector('#add').value = {text!r}")
            page.click("#add-button")
            if text.endswith("x"):
                page.wait_for("document.querySelector('#add-problem').textContent !== ''")
                assert "does not exist" in page.text("#add-problem")
        row = "#models tr[data-model=b]"
        page.wait_for(
            f"document.querySelector({row + ' [aria-label^=Remove]'!r})?.disabled === false"
        )
        assert page.text("#add-problem") == ""
        complete(server, "b", 3)
        page.click(f"{row} [aria-label^=Remove]")
        assert page.text(f"{row} [aria-label^=Remove]") == "Remove?"
        page.click(f"{row} [aria-label^=Remove]")
        page.wait_for(f"document.querySelector({row!r}) === null")
        assert server.call("GET", "/v1/models/b")[0] == 404
        assert [each for each in page.problems if "400 (Bad Request)" not in each] == []


def test_why_a_model_is_not_loaded_is_shown_until_it_is(page: Page, tmp_path: Path):
    file = shutil.copytree(DEMO, tmp_path / "b") / "model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(file).items()}, file)
    command = ["-m", "aquifer", "serve", "demo", f"b={file.parent}", "--port", "0"]
    with running([*command, "--memory", "32M", "--max-model-len", "256"]) as server:
        page.open(server.url)
        page.wait_for("document.querySelector('#status').textContent === 'live'")
        problem = "document.querySelector('tr[data-model=b] .problem')?.textContent"
        assert server.call("POST", "/models/b/unload", {})[0] == 200
        hidden = file.rename(tmp_path / "hidden")
        assert server.call("POST", "/models/b/load", {})[0] == 400
        page.wait_for(f"{problem}.includes('model.safetensors')")
        hidden.rename(file)
        assert server.call("POST", "/models/b/load", {})[0] == 200
        page.wait_for(f"{problem} === ''")


def test_without_operations_the_buttons_tell_why_they_do_nothing(
    small_server: RunningServer, page: Page
):
    source = _FAKE_OPERATIONS.replace('new Response("{}");', 'new Response("", {status: 404});', 1)
    page.command("Page.addScriptToEvaluateOnNewDocument", source=source)
    page.open(small_server.url)
    page.wait_for("document.querySelectorAll('#models button').length > 0")
    page.wait_for("document.querySelector('#models-note').textContent !== ''")
    assert page.text("#models-note") == "This server has no operations on models."
    assert page.evaluate("[...document.querySelectorAll('#models button')].every(b => b.disabled)")


def test_it_asks_for_the_key(keyed_server: RunningServer, page: Page):
    page.open(keyed_server.url)
    page.wait_for("!document.querySelector('#key-card').hidden")
    page.type("wrong")
    page.click("#key-form button")
    page.wait_for("document.querySelector('#key-problem').textContent !== ''")
    assert "does not accept" in page.text("#key-problem")
    page.type("secret")
    page.click("#key-form button")
    page.wait_for("document.querySelector('#status').textContent === 'live'")
    assert page.evaluate("document.querySelector('#key-card').hidden")
    assert page.text("#models .name") == "tiny"
    page.click("#forget")
    page.wait_for("document.querySelector('#key-card')?.hidden === false")
    # The browser itself notes the answers of status 401.
    assert [each for each in page.problems if "401 (Unauthorized)" not in each] == []
