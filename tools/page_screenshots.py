"""Pictures of the server's page for the README, from a real server in a real browser.

python tools/page_screenshots.py --out docs
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from load_server import Server
from playwright.sync_api import sync_playwright

MODELS = ("pocket-mdlm", "pocket-xdlm", "pocket-udlm")
LINK = (
    "#{models}&text=It+was+a+dark+night%2C+and&tokens=48&steps=32&sampler=ancestral&temperature=0.8"
    "&top_p=1&seed=3"
)
#: Name, how many models, the step on show, and the window.
SHOTS: tuple[tuple[str, int, int, dict[str, Any]], ...] = (
    ("page-light", 3, 14, {"viewport": {"width": 1200, "height": 940}, "color_scheme": "light"}),
    ("page-phone-dark", 1, 12, {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--browser", default=shutil.which("chromium"))
    options = parser.parse_args()
    with Server("--model", *MODELS) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        for name, n, step, window in SHOTS:
            names = MODELS if n == 3 else MODELS[1:2]
            link = LINK.format(models="&".join(f"model={model}" for model in names))
            page = browser.new_page(reduced_motion="reduce", **window)
            page.goto(f"http://127.0.0.1:{server.port}/{link}")
            page.wait_for_selector("#panes[aria-busy=false]")
            page.locator("h1").click()
            page.keyboard.press("Home")
            for _ in range(step):
                page.keyboard.press("ArrowRight")
            if n == 3:
                page.locator(".tokens .refined").last.hover()
            page.screenshot(path=options.out / f"{name}.png", full_page=n == 1)
            print(options.out / f"{name}.png", file=sys.stderr)
        browser.close()


if __name__ == "__main__":
    main()
