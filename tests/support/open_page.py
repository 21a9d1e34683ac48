"""Opens a page in a real browser, headless, and prints what was seen as JSON.

    python open_page.py PAGE SELECTOR... [--pictures FOLDER]

The browser is Chromium as Qt brings it (PySide6), which comes by pip alone. A program of its own:
Qt wants the main thread, and its end takes the browser's processes with it.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ["QT_QPA_PLATFORM"] = "offscreen"
# No sandbox, which root may not use; the page is a local file.
os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = "--no-sandbox --disable-gpu"

from PySide6.QtCore import QEventLoop, QTimer, QUrl
from PySide6.QtWebEngineCore import (
    QWebEnginePage,
    QWebEngineProfile,
    QWebEngineSettings,
    QWebEngineUrlRequestInterceptor,
)
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

WIDTHS = (400, 1280)
LIMIT_MS = 60_000
# Everything that reaches beyond the window although it is not inside something that scrolls.
OVERFLOW = """
(() => {
  const wide = [], edge = document.documentElement.clientWidth + 1;
  for (const one of document.body.querySelectorAll("*")) {
    if (one.closest(".scroll") && !one.classList.contains("scroll")) continue;
    const box = one.getBoundingClientRect();
    if (box.width > 0 && (box.right > edge || box.left < -1))
      wide.push(one.tagName + "." + one.getAttribute("class") + " " + box.left + " " + box.right);
  }
  return JSON.stringify({
    inner: window.innerWidth,
    scroll: document.documentElement.scrollWidth,
    height: document.documentElement.scrollHeight,
    wide: wide.slice(0, 9),
  });
})()
"""


class Requests(QWebEngineUrlRequestInterceptor):
    """Records all requests of the page."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def interceptRequest(self, info) -> None:
        self.seen.append(info.requestUrl().toString()[:200])


class Page(QWebEnginePage):
    """Records errors of scripts and of the browser."""

    def __init__(self, profile: QWebEngineProfile) -> None:
        super().__init__(profile)
        self.messages: list[str] = []

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        self.messages.append(f"{level.name}: {message} ({source}:{line})")


def wait_for(start) -> object:
    """Call ``start(done)``, and run until it has called ``done(value)``."""
    loop, results = QEventLoop(), []

    def done(value: object = None) -> None:
        results.append(value)
        loop.quit()

    start(done)
    if not results:
        QTimer.singleShot(LIMIT_MS, loop.quit)
        loop.exec()
    if not results:
        raise SystemExit("the browser does not answer")
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("selectors", nargs="*")
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--open", action="store_true", help="open all details, too")
    parser.add_argument("--dark", action="store_true", help="as people see it who prefer dark")
    options = parser.parse_args()
    if options.dark:
        os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] += " --blink-settings=preferredColorScheme=0"
    app = QApplication([""])
    profile, requests = QWebEngineProfile(), Requests()
    profile.setUrlRequestInterceptor(requests)
    page, view = Page(profile), QWebEngineView()
    # Or what a local page asks for from elsewhere would be stopped before it is seen.
    remote = QWebEngineSettings.WebAttribute.LocalContentCanAccessRemoteUrls
    page.settings().setAttribute(remote, True)
    view.setPage(page)
    view.resize(WIDTHS[-1], 900)
    view.show()

    def load(done) -> None:
        page.loadFinished.connect(done)
        page.load(QUrl.fromLocalFile(str(options.page.resolve())))

    def script(text: str) -> object:
        return wait_for(lambda done: page.runJavaScript(text, done))

    loaded = wait_for(load)
    if options.open:
        script("document.querySelectorAll('details').forEach(one => { one.open = true; }); 1")
    seen = {}
    for width in WIDTHS:
        view.resize(width, 900)
        wait_for(lambda done: QTimer.singleShot(300, done))
        seen[str(width)] = json.loads(script(OVERFLOW))
        if options.pictures:
            view.resize(width, min(int(seen[str(width)]["height"]), 7000))
            wait_for(lambda done: QTimer.singleShot(2500, done))
            view.grab().save(str(options.pictures / f"{width}.png"))
    counts = {
        selector: script(f"document.querySelectorAll({json.dumps(selector)}).length")
        for selector in options.selectors
    }
    print(
        json.dumps(
            {
                "loaded": loaded,
                "title": page.title(),
                "ground": script("getComputedStyle(document.body).backgroundColor"),
                "text": script("document.body.innerText"),
                "messages": page.messages,
                "requests": requests.seen,
                "widths": seen,
                "counts": counts,
            }
        )
    )
    view.close()
    view.setPage(None)
    page.deleteLater()  # before the profile, which it uses
    app.processEvents()


if __name__ == "__main__":
    main()
