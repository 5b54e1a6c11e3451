"""A headless Chromium that reads reports from disk."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest


@pytest.fixture(scope="module")
def chromium():
    with browser() as page:
        yield page


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """Folder of the reports that are opened."""
    return tmp_path_factory.mktemp("reports")


PHONE_WIDTH = 390
_PATIENCE_S = 300


@dataclass(frozen=True)
class Page:
    """A report in the browser."""

    driver: Any

    def ask(self, script, *arguments):
        """Returns what a function body in JavaScript returns."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def find_all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def open_all(self):
        """Opens every part that can be opened."""
        self.ask("for (const part of document.querySelectorAll('details')) part.open = true;")

    def wait_for(self, condition):
        from selenium.webdriver.support.ui import WebDriverWait

        waiting = WebDriverWait(self.driver, _PATIENCE_S, poll_frequency=0.05)
        waiting.until(lambda _: self.ask(f"return {condition}"), f"never came: {condition}")

    def complaints(self):
        """Everything the console was told since it was last asked: the policy's refusals are among it."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def requests(self):
        """Every address the page asked for since this was last asked."""
        messages = [
            json.loads(entry["message"])["message"]
            for entry in self.driver.get_log("performance")  # type: ignore[no-untyped-call]
        ]
        sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [params["request"]["url"] for params in sent]

    def show(self, page, *, width=1280, height=900, dark=False):
        """Opens a page as a screen of that size and theme shows it."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
        self.driver.get("about:blank")
        self.complaints()
        self.requests()
        self.driver.get(page.as_uri())
        self.wait_for("document.documentElement.dataset.ready === 'true'")
        return self


def _find_program(names):
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        reason = f"none of {', '.join(names)} is installed"
        # Where every change is checked, a check that is passed over is one that nobody makes.
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@contextmanager
def browser():
    """Yields an empty page; skips the test where there is no Chromium, unless this is a check of a change."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _find_program(("chromium", "chromium-browser", "google-chrome"))
    # No sandbox: checks of changes run as root in a container, where Chromium has none.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = Service(_find_program(("chromedriver",)))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Page(driver)
    finally:
        driver.quit()
