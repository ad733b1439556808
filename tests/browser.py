"""A real browser: Debian's chromium with its chromedriver; tests without them are skipped."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from integration.server.live import wait_for


def _why_no_browser() -> str | None:
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"no {program} here: apt install chromium chromium-driver"
    return None


NO_BROWSER = _why_no_browser()
needs_browser = pytest.mark.skipif(NO_BROWSER is not None, reason=str(NO_BROWSER))


class Browser:
    """One headless window on the page of a server."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1280,1000",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        self.driver = webdriver.Chrome(options=options, service=service)

    def type(self, selector: str, *keys: str) -> None:
        self.find(selector).send_keys(*keys)

    def open(self, url: str) -> None:
        self.driver.get(url)
        self.wait("return document.body.classList.contains('ready')")

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, script: str, timeout_s: float = 20.0) -> None:
        wait_for(lambda: self.run(script), timeout_s, what=script)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def set(self, field: str, value: object) -> None:
        """As a user would have left it: the field says that it has changed."""
        self.run(
            "const f = document.getElementById(arguments[0]); f.value = arguments[1];"
            "for (const name of ['input', 'change'])"
            "  f.dispatchEvent(new Event(name, {bubbles: true}));",
            field,
            str(value),
        )

    def wait_until_done(self) -> None:
        self.wait("return !document.getElementById('generate').disabled")

    def texts(self) -> list[str]:
        found: list[str] = self.run(
            "return [...document.querySelectorAll('.written')].map(w => w.textContent)"
        )
        return found

    def said(self, field: str) -> str:
        found: str = self.run("return document.getElementById(arguments[0]).textContent", field)
        return found

    def check_console(self) -> None:
        """No script failed, and nothing had to be blocked."""
        entries = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        assert not entries, entries
