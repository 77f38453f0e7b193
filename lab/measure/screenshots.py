"""Takes the pictures of the page in docs/serving.md, in headless Chromium.

    pip install playwright pillow; apt-get install chromium
    python lab/measure/screenshots.py docs/pictures

The server is a process of its own over the bundled pair; the same text with speculation and without.
"""

import io
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright
from usage import usage

usage(__doc__, needed=1)

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
COMMAND = "from outpace.cli.main import run; run()"


@contextmanager
def served():
    words = [sys.executable, "-c", COMMAND, "serve", "--port", "0", "--verify", "coupled"]
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in server.stderr if "serves" in line)
        yield line.split()[-1]
    finally:
        server.terminate()
        server.wait(60)


def shoot(page, file):
    picture = Image.open(io.BytesIO(page.screenshot()))
    picture.convert("RGB").save(file, quality=82, method=6)
    print(file, picture.size, file.stat().st_size // 1000, "KB")


def ask(page, mode, text, tokens):
    page.click("#options summary")
    page.check(f"[value={mode}]")
    page.fill("#tokens", tokens)
    page.fill("#temperature", "0.8")
    page.select_option("#speculative", "4")
    page.click("#options summary")
    page.fill("#prompt", text)
    page.click("#run")
    page.wait_for_selector("#rounds:not([hidden])")


def side_by_side(page):
    ask(page, "prompt", "Once upon a time there was a little girl named Lily. She", "90")
    page.click(".pane:first-child .text .corrected")
    page.wait_for_selector("#tree svg")
    page.mouse.move(0, 0)


def chat(page):
    ask(page, "chat", "Tell me about a cat.", "60")
    page.hover(".text .accepted")


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    browser_path = next(filter(None, map(shutil.which, BROWSERS)))
    with served() as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for name, act, size, scheme in (
            ("playground-light", side_by_side, (1200, 640), "light"),
            ("playground-dark", chat, (390, 720), "dark"),
        ):
            page = browser.new_page(
                viewport={"width": size[0], "height": size[1]},
                color_scheme=scheme,
                device_scale_factor=1.25,
            )
            page.goto(url)
            page.wait_for_selector("#about:not(:empty)")
            act(page)
            shoot(page, folder / f"{name}.webp")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
