"""The chat at / and the routes at /docs, in a real browser."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from browser import Browser, needs_browser
from integration.server.live import Live, wait_for
from outrider.engine.build import EngineConfig
from outrider.events import StepReport
from outrider.testing import write_tiny_llama

pytestmark = needs_browser
KEY = "a-key"
MARKUP = "<img src=x onerror=document.title='broken'><b>bold</b>"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Bergen"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("chat")
    target = write_tiny_llama(folder, vocab_size=320, num_tokens=300, max_positions=2048)
    return EngineConfig(model=str(target), proposer="ngram", threads=1, kv_tokens=8192)


@pytest.fixture(scope="module")
def live(engine_config: EngineConfig) -> Iterator[Live]:
    with Live(engine_config, model_aliases=("another-name",)) as server:
        yield server
        server.check()


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.driver.quit()


@pytest.fixture
def browser(window: Browser, live: Live) -> Iterator[Browser]:
    window.open(f"{live.url}/")
    window.set("max-tokens", 24)
    yield window
    window.check_console()


def wait_until_done(browser: Browser) -> None:
    browser.wait("return !document.getElementById('send').disabled")


def turns(browser: Browser) -> list[str]:
    found: list[str] = browser.run(
        "return [...document.querySelectorAll('.turn .text')].map(e => e.textContent)"
    )
    return found


def test_chat_and_copy(browser: Browser, live: Live) -> None:
    models = "return [...document.getElementById('model').options].map(o => o.value)"
    assert browser.run(models) == ["tiny", "another-name"]
    browser.set("temperature", 0)
    browser.type("#prompt", "hello there", "\n")
    wait_until_done(browser)
    expected = live.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hello there"}],
            "temperature": 0,
            "max_tokens": 24,
        },
    ).json()
    assert turns(browser) == ["hello there", expected["choices"][0]["message"]["content"]]
    assert "24 tokens" in browser.find(".turn.assistant .figures").text
    browser.driver.execute_cdp_cmd(
        "Browser.grantPermissions",
        {
            "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"],
            "origin": live.url,
        },
    )
    browser.find(".turn.user .copy").click()
    browser.wait("return document.querySelector('.turn.user .copy').textContent == 'Copied'")
    copied = browser.driver.execute_async_script(
        "navigator.clipboard.readText().then(arguments[0], arguments[0])"
    )
    assert copied == "hello there"
    browser.type("#prompt", "and then", "\n")
    wait_until_done(browser)
    assert len(turns(browser)) == 4
    assert browser.run("return conversation.map(m => m.role)") == ["user", "assistant"] * 2


def test_a_reply_is_streamed_and_can_be_stopped(
    browser: Browser, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    from selenium.webdriver.common.keys import Keys

    step = live.core.step

    def slow() -> StepReport | None:
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(live.core, "step", slow)
    browser.set("max-tokens", 400)
    browser.type("#prompt", "a long way home", "\n")
    browser.wait("return document.querySelector('.turn.assistant .text')?.textContent.length > 5")
    assert not browser.find("#send").is_enabled()
    before = len(turns(browser)[1])
    browser.wait(f"return document.querySelector('.assistant .text').textContent.length > {before}")
    browser.type("#prompt", Keys.ESCAPE)
    wait_until_done(browser)
    wait_for(live.is_settled, what="the request goes on")
    assert turns(browser)[1]
    browser.find("#clear").click()
    assert turns(browser) == []


def test_a_tool_call_is_shown_and_takes_a_result(browser: Browser) -> None:
    browser.find("#settings summary").click()
    browser.set("tools", json.dumps([TOOL]))
    browser.find("#must-call").click()
    browser.set("max-tokens", 90)
    browser.type("#prompt", "weather?", "\n")
    wait_until_done(browser)
    assert browser.find(".call code").text == "weather"
    assert json.loads(browser.find(".call pre").text)["city"] in ("Oslo", "Bergen")
    browser.find("#must-call").click()
    browser.type(".call .result", "rain")
    browser.find("#send").click()
    wait_until_done(browser)
    roles = browser.run("return conversation.map(m => m.role)")
    assert roles[:3] == ["user", "assistant", "tool"]
    assert roles[-1] == "assistant"
    assert browser.run("return conversation[2].content") == "rain"


def test_tools_that_are_no_json_lose_nothing(browser: Browser) -> None:
    browser.find("#settings summary").click()
    browser.set("tools", "[{")
    browser.type("#prompt", "weather?", "\n")
    assert browser.find("#error").text.startswith("Tools: ")
    assert browser.run("return document.getElementById('prompt').value") == "weather?"
    assert turns(browser) == []


def test_the_keyboard_is_enough(browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    assert browser.run("return document.activeElement.id") == "prompt"
    browser.type("#prompt", "one", Keys.SHIFT, Keys.ENTER, Keys.SHIFT, "two", Keys.ENTER)
    wait_until_done(browser)
    assert turns(browser)[0] == "one\ntwo"
    reachable = browser.run(
        "return [...document.querySelectorAll('input, select, button, textarea')]"
        ".every(e => e.tabIndex >= 0 && (e.labels?.length || e.textContent.trim()))"
    )
    assert reachable


def test_markup_is_inert(browser: Browser) -> None:
    browser.type("#prompt", MARKUP, "\n")
    wait_until_done(browser)
    assert turns(browser)[0] == MARKUP
    assert browser.run("return document.querySelectorAll('.log img, .log b').length") == 0
    assert browser.driver.title == "Outrider"


def test_a_refusal_is_one_readable_line(browser: Browser) -> None:
    browser.set("prompt", "word " * 900)
    browser.find("#send").click()
    wait_until_done(browser)
    assert "maximum context length" in browser.find("#error").text
    browser.driver.get_log("browser")  # type: ignore[no-untyped-call]  # says "400", rightly


def test_dark_and_on_a_phone(browser: Browser) -> None:
    light = browser.run("return getComputedStyle(document.body).backgroundColor")
    wish = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", wish)
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.type("#prompt", "word" * 40, "\n")
        wait_until_done(browser)
        assert browser.run("return getComputedStyle(document.body).backgroundColor") != light
        assert browser.run("return document.documentElement.scrollWidth") <= 360
        assert browser.find("#send").is_displayed()
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_every_route_is_described(browser: Browser, live: Live) -> None:
    browser.open(f"{live.url}/docs")
    paths = browser.run(
        "return [...document.querySelectorAll('summary code')].map(e => e.textContent)"
    )
    assert {"/v1/chat/completions", "/v1/messages", "/api/chat", "/completion"} <= set(paths)
    fields = browser.run("return [...document.querySelectorAll('td code')].map(e => e.textContent)")
    assert {"messages", "temperature", "tools", "speculation"} <= set(fields)


def test_a_password_opens_the_chat(window: Browser, engine_config: EngineConfig) -> None:
    with Live(engine_config, api_keys=(KEY,)) as keyed:
        window.open(keyed.url.replace("//", f"//me:{KEY}@") + "/")
        window.set("max-tokens", 4)
        window.type("#prompt", "hello", "\n")
        wait_until_done(window)
        assert len(turns(window)) == 2
        refused = keyed.client.post(
            "/v1/messages", json={}, headers={"authorization": "Basic bWU6YS1rZXk="}
        )
        assert refused.status_code == 401
