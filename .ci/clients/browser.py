#!/usr/bin/env python3
"""Drives the server's page in a real Chromium, as a person would: chats, looks at data, fine-tunes on the demo's data,
chats with the result and compares it with the base. Fails if anything goes to another origin, or if the browser's
console has an error, which a violation of the page's policy is too.

    browser.py [FOLDER]

This needs chromium and the package `playwright`; screenshots go to FOLDER.
"""

import re
import shutil
import sys
import tarfile
import time
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

from server import DEMO, Server

DATA = DEMO / "instructions"
QUESTION = "How many legs has a beetle?"
TUNED = re.compile("^ft:")
# Seconds that a job may take, data and all.
JOB = 300
WIDTHS = {"desktop": (1280, 800), "phone": (390, 844), "narrow": (360, 640)}


class Test:
    def __init__(self, page: Page, url: str, shots: Path | None):
        self.page, self.url, self.shots = page, url.rstrip("/"), shots
        self.wrong: list[str] = []
        page.on("console", lambda said: said.type in ("error", "warning") and self.wrong.append(said.text))
        page.on("pageerror", lambda error: self.wrong.append(f"uncaught: {error}"))
        page.on("request", self.stays_here)
        page.on("response", self.succeeded)

    def stays_here(self, request):
        if not request.url.startswith((f"{self.url}/", f"blob:{self.url}/")):
            self.wrong.append(f"a request left the origin: {request.url}")

    def succeeded(self, response):
        if response.status >= 400:
            self.wrong.append(f"{response.status} {response.request.method} {response.url}")

    def step(self, what: str):
        print(f"  {what}", flush=True)

    def look(self, name: str):
        """Nothing is wider than the window, at any width and in both themes."""
        for size, (width, height) in WIDTHS.items():
            self.page.set_viewport_size({"width": width, "height": height})
            wide = self.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, f"{name} is {wide} pixels wide in a window of {width}"
            for theme in ("light", "dark") if self.shots else ():
                self.page.emulate_media(color_scheme=theme)
                self.page.screenshot(path=self.shots / f"{name}-{size}-{theme}.png", animations="disabled")
        self.page.emulate_media(color_scheme="light")
        self.page.set_viewport_size(dict(zip(("width", "height"), WIDTHS["desktop"])))

    def open(self, name: str):
        self.page.get_by_role("navigation").get_by_role("link", name=name).click()

    def ask(self, label: str, text: str, answers: int):
        """Asks, and waits for so many answers on the page to be complete."""
        done = self.page.locator(".answer[aria-busy=false]")
        box = self.page.get_by_label(label)
        box.fill(text)
        box.press("Enter")
        expect(done).to_have_count(answers, timeout=60_000)
        expect(self.page.get_by_role("button", name="Send")).to_be_visible()
        for answer in done.all():
            expect(answer.locator(".text").last).not_to_be_empty()

    def chats(self):
        page = self.page
        page.goto(self.url)
        expect(page).to_have_title("Chat · metal-candle")
        expect(page.locator("#server .dot.good")).to_be_visible()
        self.look("chat-empty")
        self.ask("Say something", QUESTION, 1)
        page.get_by_role("button", name="Write again").click()
        expect(page.get_by_role("button", name="Write again")).to_be_visible(timeout=60_000)
        expect(page.locator(".answer")).to_have_count(1)
        self.ask("Say something", "<img src=x onerror=alert(1)> **bold**", 2)
        expect(page.locator(".log img")).to_have_count(0)
        page.reload()
        expect(page.locator(".answer")).to_have_count(2)
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator(".answer")).to_have_count(0)

    def tells_probabilities(self):
        page = self.page
        box = page.get_by_label("Show how sure")
        box.check()
        self.ask("Say something", QUESTION, 1)
        page.get_by_role("group", name="Tokens and their probabilities").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator(".odds")).to_contain_text("%")
        box.uncheck()
        page.get_by_role("button", name="New conversation").click()

    def uploads(self):
        page = self.page
        self.open("Fine-tune")
        expect(page.get_by_text("None yet")).to_be_visible()
        page.set_input_files("input[type=file]", [DATA / "train.jsonl", DATA / "valid.jsonl"])
        row = page.locator(".files details", has_text="train.jsonl")
        expect(row.locator(".verdict")).to_have_text("417 examples", timeout=30_000)
        expect(page.locator(".files details", has_text="valid.jsonl").locator(".verdict")).to_have_text("32 examples")
        expect(row.locator(".tokens")).to_contain_text("It is 11.")
        expect(row.locator(".tokens mark", has_text="11")).to_be_visible()
        expect(row.locator(".tokens mark", has_text="18")).to_have_count(0)
        self.look("fine-tune")

    def trains(self):
        page = self.page
        # Many short steps, so that the job can be watched, and is still there to be paused on a busy machine.
        page.locator("input[name=n_epochs]").fill("15")
        page.locator("input[name=batch_size]").fill("1")
        page.get_by_label("Suffix").fill("facts")
        page.get_by_role("button", name="Start the job").click()
        page.wait_for_url("**/#tune/ftjob-*")
        plot = page.get_by_role("slider", name="Loss by step")
        status = page.locator("h1 + .status")
        expect(plot).to_have_attribute("aria-valuemax", re.compile("."), timeout=30_000)
        page.get_by_role("button", name="Pause").click()
        expect(status).to_have_text("paused", timeout=30_000)
        seen = int(plot.get_attribute("aria-valuemax"))
        self.look("job-paused")
        page.get_by_role("button", name="Resume").click()
        end = time.monotonic() + JOB
        while (now := status.text_content()) not in ("succeeded", "failed", "cancelled"):
            assert time.monotonic() < end, f"the job is {now} after {JOB} s"
            page.wait_for_timeout(200)
        assert now == "succeeded", page.locator(".problem").first.text_content()
        last = int(plot.get_attribute("aria-valuemax"))
        assert seen < last, f"the curve has not grown from step {seen}, but ended at {last}"
        plot.focus()
        page.keyboard.press("Home")
        first = plot.get_attribute("aria-valuetext")
        page.keyboard.press("End")
        expect(plot).to_have_attribute("aria-valuetext", re.compile(f"^step {last},"))
        assert int(re.match(r"step (\d+),", first)[1]) < seen, (first, seen)
        expect(page.get_by_role("link", name="Chat with the checkpoint")).not_to_have_count(0)
        with page.expect_download() as download:
            page.get_by_role("button", name="Download the adapter").click()
        assert download.value.path().stat().st_size > 0
        with page.expect_download() as download:
            page.get_by_role("button", name="Download the figures").click()
        assert download.value.path().read_text().startswith("step,")
        samples = page.locator(".sample")
        expect(samples).to_have_count(3)
        expect(samples.first.locator("p").first).to_contain_text("step")
        with page.expect_download() as download:
            page.get_by_role("button", name="Download the merged model").click()
        with tarfile.open(download.value.path()) as merged:
            names = [Path(name).name for name in merged.getnames()]
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names), names
        self.look("job")

    def uses_the_result(self):
        page = self.page
        job = page.url
        page.get_by_role("link", name="Chat with it").click()
        expect(page.get_by_role("combobox", name="Model", exact=True)).to_have_value(TUNED)
        self.ask("Say something", QUESTION, 1)
        self.look("chat")
        page.goto(job)
        page.get_by_role("link", name="Compare with the base").click()
        expect(page.get_by_role("combobox", name="Model B")).to_have_value(TUNED)
        self.ask("Ask both", QUESTION, 2)
        self.look("compare")

    def shows_the_load(self):
        self.open("Load")
        plots = self.page.get_by_role("slider")
        expect(plots).to_have_count(3)
        for plot in plots.all():
            expect(plot.locator("polyline").first).to_be_attached(timeout=15_000)
        self.page.wait_for_timeout(3000)
        self.look("load")

    def says_who_may_see_the_load(self):
        """With a key that may not see the figures, as the server answers it."""
        error = {"message": "the API key laptop may chat only", "type": "permission_error", "param": None, "code": None}
        self.page.route("**/metrics", lambda route: route.fulfill(status=403, json={"error": error}))
        self.page.reload()
        expect(self.page.get_by_text("for keys with the scope admin")).to_be_visible()
        expect(self.page.get_by_role("slider")).to_have_count(0)
        expect(self.page.get_by_text("No job is running")).to_be_visible()
        self.look("load-closed")
        self.page.unroute("**/metrics")
        self.wrong = [line for line in self.wrong if "403" not in line]

    def run(self):
        parts = (self.chats, self.tells_probabilities, self.uploads, self.trains, self.uses_the_result)
        for part in (*parts, self.shows_the_load, self.says_who_may_see_the_load):
            self.step(part.__name__.replace("_", " "))
            part()
            assert not self.wrong, "\n".join(self.wrong)


def main():
    shots = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if shots:
        shots.mkdir(parents=True, exist_ok=True)
    with Server() as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        Test(browser.new_page(), server.url, shots).run()
        browser.close()
    print("the page works")


if __name__ == "__main__":
    main()
