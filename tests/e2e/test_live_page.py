"""The live page: its streams over HTTP, and the page itself in a real browser.

The browser is Debian's chromium with its chromedriver; without them those tests are skipped.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from browser import Browser, needs_browser
from integration.server.live import Live, chunks_of, wait_for
from outrider.engine.build import EngineConfig
from outrider.events import StepReport
from outrider.policy import MAX_AUTO_DRAFT_TOKENS
from outrider.policy.base import Choice
from outrider.policy.controller import AdaptivePolicy
from outrider.testing import write_tiny_llama

KEYS = ("first-key", "second-key")
PROMPT = "in the beginning there was"
MARKUP = "<img src=x onerror=document.title='broken'><b>bold</b> &amp; "
FILES = ("/live", "/live/live.css", "/live/live.js")


@pytest.fixture(scope="module")
def engine_config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    root = tmp_path_factory.mktemp("live")
    target = write_tiny_llama(root / "target", vocab_size=320, num_tokens=300)
    draft = write_tiny_llama(root / "draft", vocab_size=320, num_tokens=300, num_layers=1)
    return EngineConfig(
        model=str(target),
        draft_model=str(draft),
        num_draft_tokens="auto",
        threads=1,
        kv_tokens=8192,
    )


@pytest.fixture(scope="module")
def live(engine_config: EngineConfig) -> Iterator[Live]:
    with Live(engine_config, proposers=("ngram", "draft-tree", "prediction")) as server:
        yield server
        server.check()


@pytest.fixture(scope="module")
def keyed(engine_config: EngineConfig) -> Iterator[Live]:
    with Live(engine_config, api_keys=KEYS) as server:
        yield server


def watch(server: Live, path: str = "/live/completion", **body: Any) -> list[dict[str, Any]]:
    """Every event of a live stream that must succeed."""
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return chunks_of(response.text)


def slow_down(server: Live, monkeypatch: pytest.MonkeyPatch, by_s: float = 0.02) -> None:
    step = server.core.step

    def slow() -> StepReport | None:
        time.sleep(by_s)
        return step()

    monkeypatch.setattr(server.core, "step", slow)


def asked(seed: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "max_tokens": 40,
        "temperature": 0.8,
        "seed": seed,
        "ignore_eos": True,
    } | more


# --- the streams ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "speculation",
    [
        {"off": True},
        {"proposer": "draft-model", "num_draft_tokens": 3},
        {"proposer": "draft-tree", "num_draft_tokens": 6},
        {"proposer": "draft-model", "num_draft_tokens": "auto"},
    ],
    ids=["plain", "chain", "tree", "auto"],
)
def test_every_step_is_told_and_the_text_is_the_apis(
    live: Live, speculation: dict[str, Any]
) -> None:
    start, *steps, end = watch(live, **asked(5), speculation=speculation)
    assert start["start"]["num_prompt_tokens"] == len(PROMPT)
    pieces = [piece for step in steps for piece in step["pieces"]]
    assert "".join(pieces) == end["end"]["text"] == live.text(**asked(5))
    assert len(pieces) == 40
    assert end["end"]["seed"] == 5
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    clock = [step["at_s"] for step in steps]
    assert clock[0] == 0
    assert clock == sorted(clock)
    for step in steps:
        kept = [node for node in step["nodes"] if node["kind"] == "accepted"]
        assert len(kept) == len(step["path"])
        assert len(step["pieces"]) == len(step["path"]) + len(step["own"])
        assert all(-1 <= node["parent"] < i for i, node in enumerate(step["nodes"]))
        refused = {n["kind"] for n in step["nodes"]} - {"accepted"}
        for own in step["own"]:
            expected = {"correction", "bonus"} if step["nodes"] else {"target"}
            assert own["kind"] in expected
            if speculation.get("proposer") == "draft-model" and step["nodes"]:
                assert (own["kind"] == "correction") == bool(refused)
    stats = steps[-1]["stats"]
    assert stats["num_tokens"] == 40
    assert stats["num_steps"] == len(steps)
    drafted = sum(len(step["nodes"]) for step in steps)
    assert stats["num_drafted"] == drafted
    if speculation.get("num_draft_tokens") != "auto":  # which may find that drafts do not pay
        assert (drafted > 0) == ("off" not in speculation)


def test_a_tree_is_drafted_as_a_tree(live: Live) -> None:
    speculation = {"proposer": "draft-tree", "num_draft_tokens": 8}
    steps = watch(live, **asked(5), speculation=speculation)[1:-1]
    parents = [[node["parent"] for node in step["nodes"]] for step in steps]
    assert any(len(set(some)) < len(some) for some in parents)  # somebody has two children


def test_the_controllers_reasons_are_told(live: Live) -> None:
    auto = {"proposer": "draft-model", "num_draft_tokens": "auto"}
    steps = watch(live, **asked(1), speculation=auto)[1:-1]
    assert steps[0]["choice"] is None  # the prompt's: no draft model delays the first token
    assert steps[-1]["choice"] is None  # it had finished
    for step in steps[1:-1]:
        choice = step["choice"]
        assert len(step["nodes"]) <= choice["asked"]
        assert len(choice["rates"]) == len(choice["survival"]) + 1
        assert min(choice["rates"]) > 0
        assert step["plain_step_s"] > 0
    fixed = watch(live, **asked(1), speculation={"num_draft_tokens": 2})[1:-1]
    assert all(step["choice"] is None for step in fixed)


def test_chat_is_streamed_too(live: Live) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 3,
    }
    end = watch(live, "/live/chat", **body)[-1]["end"]
    reply = live.post("/v1/chat/completions", body).json()
    assert end["text"] == reply["choices"][0]["message"]["content"]


def test_the_page_is_told_what_the_server_offers(live: Live) -> None:
    info = live.client.get("/live/info").json()
    assert info["proposers"] == ["draft-model", "draft-tree", "ngram"]
    assert info["proposer"] == "draft-model"
    assert info["num_draft_tokens"] == "auto"
    assert info["is_chat"] is False
    load = live.client.get("/live/load").json()
    assert load["num_running"] == load["num_waiting"] == 0
    assert load["kv_tokens"] == 8192


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"n": 2}, "n"),
        ({"echo": True}, "echo"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"speculation": {"proposer": "nonesuch"}}, "speculation"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_cannot_be_watched_is_refused(live: Live, more: dict[str, Any], param: str) -> None:
    response = live.post("/live/completion", asked(1) | more)
    assert response.status_code in (400, 404)
    assert response.json()["error"]["param"] == param


def test_leaving_cancels_the_request_and_forgets_the_notes(live: Live) -> None:
    with live.client.stream("POST", "/live/completion", json=asked(1, max_tokens=400)) as response:
        for line in response.iter_lines():
            if '"step":2' in line:
                break
    wait_for(live.is_settled)
    notebook = live.core.observers[-1]
    wait_for(lambda: notebook.is_empty)  # type: ignore[attr-defined]


def test_a_paced_server_shows_no_steps(engine_config: EngineConfig) -> None:
    with Live(engine_config, paced=2000.0) as server:
        response = server.post("/live/completion", asked(1))
        assert response.status_code == 403
        assert response.json()["error"]["code"] == "paced"


def test_padded_frames_come_in_buckets(engine_config: EngineConfig) -> None:
    with Live(engine_config, pad=True) as server:
        text = server.post("/live/completion", asked(1)).text
    sizes = {len(part.encode()) + 2 for part in text.split("\n\n")[:-2]}
    assert sizes <= {256 << i for i in range(8)}


# --- who may see what -----------------------------------------------------------------------------


def basic(key: str) -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}


def test_every_route_of_the_page_needs_a_key(keyed: Live) -> None:
    with httpx.Client(base_url=keyed.url) as client:
        for path in (*FILES, "/live/info", "/live/load", "/live/nonesuch"):
            refused = client.get(path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"].startswith("Basic ")
            assert client.get(path, headers=basic("wrong")).status_code == 401
            assert client.get(path, headers={"authorization": "Basic !"}).status_code == 401
            found = 404 if path.endswith("nonesuch") else 200
            assert client.get(path, headers=basic(KEYS[1])).status_code == found
        assert client.post("/live/completion", json=asked(1)).status_code == 401
        # A password is for pages: of the API it opens only what the chat page uses.
        assert client.get("/v1/models", headers=basic(KEYS[1])).status_code == 200
        assert client.get("/v1/models/tiny", headers=basic(KEYS[1])).status_code == 401
        assert client.get("/livelier", headers=basic(KEYS[1])).status_code == 401


def test_row_45_nobody_sees_anybody_elses_request(
    keyed: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one key generates, the other's page gets sums and its own steps, nothing else."""
    slow_down(keyed, monkeypatch)
    secret = "an unmistakable secret"
    body = asked(1, prompt=secret, max_tokens=450)
    with (
        httpx.Client(base_url=keyed.url, headers=basic(KEYS[0])) as one,
        httpx.Client(base_url=keyed.url, headers=basic(KEYS[1])) as other,
        one.stream("POST", "/live/completion", json=body) as running,
    ):
        lines = running.iter_lines()
        next(line for line in lines if '"step":2' in line)
        load = other.get("/live/load").text
        info = other.get("/live/info").text
        theirs = other.post("/live/completion", json=asked(2, max_tokens=8)).text
        assert all(isinstance(value, int | float) for value in json.loads(load).values())
        assert json.loads(load)["num_running"] == 1
        own = chunks_of(theirs)
        assert [event["step"] for event in own[1:-1]] == list(range(1, len(own) - 1))
        for text in (load, info, theirs):
            assert secret not in text


def test_the_files_are_closed_to_the_outside(live: Live) -> None:
    """Nothing is loaded from elsewhere, and nothing inline could run."""
    for path in FILES:
        response = live.client.get(path)
        policy = response.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert not re.findall(r"https?://|//[a-z]+\.|@import|url\(", response.text)
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacent|document\.write", response.text)
    page = live.client.get("/live").text
    assert not re.findall(r"<style|style=|\son[a-z]+=|<script(?! src=\"/live/live.js\")", page)


# --- the page, in a browser -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.driver.quit()


@pytest.fixture
def browser(window: Browser, live: Live) -> Iterator[Browser]:
    """The page, freshly opened, playing in real time."""
    window.open(f"{live.url}/live")
    window.set("pace", 0)
    yield window
    window.check_console()


@needs_browser
def test_type_generate_switch_and_compare(browser: Browser, live: Live) -> None:
    prompt = browser.find("#prompt")
    prompt.clear()
    prompt.send_keys(PROMPT)
    for field, value in (("temperature", 0.8), ("seed", 7), ("max-tokens", 30)):
        browser.set(field, value)
    expected = live.text(**asked(7, max_tokens=30, ignore_eos=False))
    for proposer in ("draft-model", "draft-tree", "ngram"):
        browser.set("proposer-A", proposer)
        browser.find("#generate").click()
        browser.wait_until_done()
        assert browser.texts() == [expected, expected]
        assert browser.said("verdict").startswith("Same seed, same text")
        assert "seed 7" in browser.said("verdict")
    assert float(browser.find(".per-pass").text) >= 1
    assert browser.run("return document.querySelectorAll('.pane .tree .chip').length") > 0
    browser.find("#replay").click()
    browser.wait_until_done()
    assert browser.texts() == [expected, expected]


@needs_browser
def test_the_chosen_number_is_one_of_the_bars(
    browser: Browser, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large it is, and whoever decides in the end."""
    explain, many = AdaptivePolicy.explain, MAX_AUTO_DRAFT_TOKENS

    def most(controller: AdaptivePolicy, view: Any) -> Choice | None:
        choice = explain(controller, view)
        return choice and replace(choice, decided=many, asked=many, stops_itself=True)

    monkeypatch.setattr(AdaptivePolicy, "explain", most)
    browser.set("prompt", PROMPT)
    browser.set("max-tokens", 24)
    browser.find("#generate").click()
    browser.wait("return document.querySelectorAll('.token').length > 0")
    browser.wait_until_done()
    assert browser.find(".rates .decided span").text == str(many)
    assert browser.find(".why").text.startswith(f"At most {many}, and the drafter stops")


@needs_browser
def test_stop_ends_the_request_and_keeps_what_is_there(
    browser: Browser, live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down(live, monkeypatch, 0.1)
    browser.set("prompt", PROMPT)
    browser.set("max-tokens", 400)
    browser.set("proposer-B", "")
    browser.find("#generate").click()
    browser.wait("return document.querySelectorAll('.token').length > 3")
    assert live.core.has_work
    browser.find("#stop").click()
    browser.wait_until_done()
    wait_for(live.is_settled)
    assert browser.find(".state").text == "stopped"
    text = browser.texts()[0]
    assert 3 < len(text) < 400
    monkeypatch.undo()
    whole = live.text(prompt=PROMPT, max_tokens=400, temperature=0, seed=1)
    assert whole.startswith(text)


@needs_browser
def test_the_keyboard_is_enough(browser: Browser) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.set("max-tokens", 24)
    browser.find("#prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    browser.wait("return document.querySelectorAll('.token').length > 0")
    browser.wait_until_done()
    timeline = browser.find(".timeline")
    timeline.send_keys(Keys.HOME)
    assert browser.find(".step-title").text.startswith("Step 1:")
    timeline.send_keys(Keys.RIGHT)
    assert browser.find(".step-title").text.startswith("Step 2:")
    reachable = browser.run(
        "return [...document.querySelectorAll('input, select, button, textarea')]"
        ".every(e => e.tabIndex >= 0 && (e.labels?.length || e.textContent.trim()))"
    )
    assert reachable


@needs_browser
def test_row_46_text_with_markup_is_inert(browser: Browser) -> None:
    """In the prompt, which stands in the page, and in tokens, which might spell anything."""
    browser.set("prompt", MARKUP)
    browser.set("max-tokens", 4)
    browser.find("#generate").click()
    browser.wait_until_done()
    assert browser.find(".given").text.strip() == MARKUP.strip()
    assert browser.run("return document.querySelectorAll('.output img, .output b').length") == 0
    browser.run(
        "const step = structuredClone(page.panes[0].steps[0]);"
        "step.pieces = [arguments[0]]; step.path = []; step.nodes = [];"
        "step.own = [{kind: 'target', text: arguments[0]}];"
        "page.panes[0].steps = [step]; page.panes[0].rewind(); page.panes[0].play(1, true);",
        MARKUP,
    )
    assert browser.texts()[0] == MARKUP
    assert browser.run("return document.querySelectorAll('.pane img, .pane .tree b').length") == 0
    assert browser.driver.title == "Outrider live"


@needs_browser
def test_a_refusal_is_one_readable_line(browser: Browser) -> None:
    browser.set("prompt", "word " * 600)
    browser.find("#generate").click()
    browser.wait_until_done()
    assert "maximum context length" in browser.find("#error").text
    browser.driver.get_log("browser")  # type: ignore[no-untyped-call]  # says "400", rightly


@needs_browser
def test_a_password_opens_the_page(window: Browser, keyed: Live) -> None:
    window.open(keyed.url.replace("//", f"//me:{KEYS[0]}@") + "/live")
    window.set("pace", 0)
    window.set("max-tokens", 12)
    window.find("#generate").click()
    window.wait_until_done()
    assert window.said("verdict").startswith("Same seed, same text")


@needs_browser
def test_nothing_sticks_out_on_a_phone(browser: Browser) -> None:
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.set("max-tokens", 24)
        browser.find("#generate").click()
        browser.wait_until_done()
        assert browser.run("return document.documentElement.scrollWidth") <= 360
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
