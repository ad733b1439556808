"""Takes docs/how-to/watch-it-live.png: the live page after a comparison, in a headless chromium.

    python docs/tools/live_picture.py [--output FILE]

Needs chromium and chromedriver. The speeds shown are measured: run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from outrider.bench.backends import launched

PICTURE = Path(__file__).parents[1] / "how-to" / "watch-it-live.png"
SIZE = (1200, 1580)
THREADS = str(max(1, (os.cpu_count() or 2) - 1))  # the browser needs one
FIELDS = {"prompt": "def fibonacci(n):", "temperature": "0.5", "seed": "1", "pace": "0"}
FILL = """
for (const [name, value] of Object.entries(arguments[0])) {
  const field = document.getElementById(name);
  field.value = value;
  for (const what of ["input", "change"]) field.dispatchEvent(new Event(what, {bubbles: true}));
}
document.getElementById("generate").click();
"""
READY = "return document.body.classList.contains('ready')"
DONE = "return !document.getElementById('generate').disabled"
CHOOSE = "document.querySelectorAll('.pane')[0].querySelectorAll('.column')[13].click()"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=PICTURE)
    output = parser.parse_args().output
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or driver is None:
        sys.exit("chromium and chromedriver are needed: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    with (
        tempfile.TemporaryDirectory() as profile,
        launched(["bundled", "--threads", THREADS]) as url,
    ):
        for argument in (
            "--headless=new",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(argument)
        window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        try:
            window.set_window_size(*SIZE)
            window.get(f"{url}/live")
            wait = WebDriverWait(window, 60)
            wait.until(lambda w: w.execute_script(READY))
            for _ in range(2):  # the first comparison warms up
                window.execute_script(FILL, FIELDS)
                wait.until(lambda w: w.execute_script(DONE))
            window.execute_script(CHOOSE)
            window.save_screenshot(str(output))
        finally:
            window.quit()
    Image.open(output).quantize(128).save(output, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    main()
