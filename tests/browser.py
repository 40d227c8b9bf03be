"""Pages in a real browser, from disk and offline; all in one tab, as a tab of its own for each takes a second."""

import contextlib
import shutil
from pathlib import Path

import pytest

from tests.limits import HANG_S

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the page is tested in a browser: pip install playwright"
)

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--disable-quic",
]  # fmt: skip
WINDOW = {"width": 1280, "height": 900}
needs_chromium = pytest.mark.skipif(
    not Path(CHROMIUM).exists(), reason="there is no Chromium: apt-get install chromium"
)


class Browser:
    """One tab that opens files; `troubles` has whatever pages ask for beside their file, and their errors."""

    def __init__(self, chromium):
        context = chromium.new_context(viewport=WINDOW, offline=True)
        context.set_default_timeout(HANG_S * 1000)
        self._tab = tab = context.new_page()
        self._file = None
        self.troubles = []
        tab.on("request", lambda request: self._note(request.url, request.url not in ("about:blank", self._file)))
        tab.on("pageerror", lambda error: self._note(str(error)))
        tab.on("console", lambda line: self._note(line.text, line.type in ("error", "warning")))
        tab.on("dialog", lambda dialog: self._note(dialog.message))

    def open(self, file, viewport=WINDOW, color_scheme="light"):
        """The page of a file, with nothing left of the one before."""
        self._tab.goto("about:blank")
        self._tab.mouse.move(0, 0)
        self._tab.set_viewport_size(viewport)
        self._tab.emulate_media(media="screen", color_scheme=color_scheme)
        self._file = file.resolve().as_uri()
        self._tab.goto(self._file)
        return self._tab

    def _note(self, text, is_trouble=True):
        if is_trouble:
            self.troubles.append(text)


@contextlib.contextmanager
def opened_browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=HANG_S * 1000)
        yield Browser(chromium)
        chromium.close()
