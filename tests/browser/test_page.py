"""The page: a generation, an infill, a scrub, models side by side, links, files, keys, a phone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from serving import MODELS, Server, started

from xdlm.report import read_recording, visible

pytestmark = pytest.mark.xdist_group("browser")
Opener = Callable[..., Any]

BLANKS = "The old man ____ the door, and ___."
TEMPLATE = "The old man <mask:4> the door, and <mask:3>."


def generate(
    page: Any, text: str, *, models: Sequence[str] = ("pocket-xdlm",), **fields: Any
) -> None:
    """Fill in the form, and wait for the end."""
    page.wait_for_selector("[name=model]")
    for name in MODELS:
        page.set_checked(f"[name=model][value={name}]", name in models)
    page.fill("#text", text)
    for name, value in {"steps": 8, "seed": 5, **fields}.items():
        if name == "sampler":
            page.select_option("#sampler", value)
        else:
            page.fill(f"#{name}", str(value))
    page.click("#generate")
    finished(page)


def reload_with(page: Any, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Load the page again, with other models on offer than the server has."""

    def answer(route: Any) -> None:
        told = route.fetch().json()
        change(told["data"])
        route.fulfill(json=told)

    page.route("**/v1/models", answer)
    page.reload()


def finished(page: Any) -> None:
    page.wait_for_selector("#panes[aria-busy=false]")


def until(holds: Callable[[], bool]) -> None:
    """Wait, in steps: the page's policy forbids that a browser evaluates conditions in it."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


def step_of(page: Any) -> int:
    return int(page.input_value("#step"))


def shown(page: Any, pane: int = 0) -> str:
    """The text on show, with [] for masks."""
    return page.evaluate(
        """(pane) => {
          const tokens = document.querySelectorAll(".tokens")[pane].childNodes;
          return [...tokens].map((n) => n.classList?.contains("masked") ? "[]" : n.textContent).join("");
        }""",
        pane,
    )


def spelled(text: str) -> str:
    """A token as the page shows it."""
    return visible(text).replace("↵", "↵\n")


def states(server: Server, **body: Any) -> list[str]:
    """What the page should show at every step, from the recording."""
    run = json.loads(server.send("POST", "/v1/trajectory", {**body, "format": "json"})[2])
    pieces = {i: spelled(text) for i, text in run["tokens"]}
    pieces.update(dict.fromkeys(run["masks"], "[]"))
    sample = run["samples"][0]
    state, found = list(sample["first"]), []
    for step in range(len(run["times"])):
        for at, position, _, after, _ in sample["events"]:
            if at == step:
                state[position] = after
        found.append("".join(pieces[i] for i in state))
    return found


def counts(page: Any, pane: int = 0) -> dict[str, int]:
    items = page.locator(".legend").nth(pane).locator("li").all_inner_texts()
    return {name: int(n) for name, n in (item.split() for item in items)}


def check_accessible(page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    found = axe.Axe().run(page)
    assert found.violations_count == 0, found.generate_report()


def test_a_generation_is_what_the_server_wrote(open_page: Opener, server: Server) -> None:
    page = open_page()
    generate(page, "It was a dark night, and", tokens=24)
    body = {
        "model": "pocket-xdlm",
        "template": "It was a dark night, and<mask:24>",
        "steps": 8,
        "seed": 5,
    }
    expected = states(server, **body)
    assert shown(page) == expected[-1] and "[]" not in expected[-1]
    assert page.inner_text("#clock").startswith("step 9 / 9, t = 0.000")
    assert "seed 5, " in page.inner_text(".facts") and "forward passes" in page.inner_text(".facts")
    check_accessible(page)


def test_an_infill_keeps_what_was_given(open_page: Opener, server: Server) -> None:
    page = open_page(color_scheme="dark")
    generate(page, BLANKS, models=["pocket-udlm"])
    body = {"model": "pocket-udlm", "template": TEMPLATE, "steps": 8, "seed": 5}
    assert shown(page) == states(server, **body)[-1]
    for step in ("Home", "End"):
        page.locator("#step").press(step)
        assert re.fullmatch(r"The old man.+ the door, and.+\.", shown(page), re.DOTALL)
    assert page.inner_text(".tokens .given >> nth=0") == "The"
    check_accessible(page)


def test_scrubbing_goes_through_every_state(open_page: Opener, server: Server) -> None:
    page = open_page()
    generate(page, BLANKS)
    expected = states(server, model="pocket-xdlm", template=TEMPLATE, steps=8, seed=5)
    slider = page.locator("#step")
    slider.press("Home")
    totals = {"unmasked": 0, "refined": 0, "remasked": 0}
    for step, state in enumerate(expected):
        assert shown(page) == state
        now = counts(page)
        assert now.pop("masked") == state.count("[]")
        assert len(page.locator(".tokens .unmasked").all()) == now["unmasked"]
        totals = {kind: n + now[kind] for kind, n in totals.items()}
        assert f"step {step} / 9" in page.inner_text("#clock")
        slider.press("ArrowRight")
    assert totals["unmasked"] >= 7 and totals["remasked"] >= 1
    # The same by the chart, and by keys that are pressed anywhere.
    box = page.locator(".chart").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 3.5 / 10, box["y"] + 20)
    assert shown(page) == expected[3]
    page.locator("h1").click()
    page.keyboard.press("ArrowLeft")
    assert shown(page) == expected[2]
    page.keyboard.press("End")
    assert shown(page) == expected[9]


def test_confidence_by_pointer_and_by_keyboard(open_page: Opener, server: Server) -> None:
    page = open_page()
    generate(page, BLANKS, models=["pocket-mdlm"])
    body = {"model": "pocket-mdlm", "template": TEMPLATE, "steps": 8, "seed": 5}
    run = json.loads(server.send("POST", "/v1/trajectory", {**body, "format": "json"})[2])
    probability = next(p for _, position, _, _, p in run["samples"][0]["events"] if position == 3)
    expected = f"{100 * probability:.1f} %"
    token = page.locator(".tokens span").nth(3)
    token.hover()
    assert expected in page.inner_text("#history") and "[mask]" in page.inner_text("#history")
    check_accessible(page)
    page.locator("#step").press("Home")  # what is open follows the steps
    assert page.locator("#history .now").inner_text().startswith("step 0")
    page.locator("#step").press("End")
    page.mouse.move(1, 1)
    assert page.locator("#history").is_hidden()
    page.locator(".tokens span").nth(0).focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert token.evaluate("token => token === document.activeElement")
    assert expected in page.inner_text("#history") and expected in page.inner_text("#status")
    page.keyboard.press("Escape")
    assert page.locator("#history").is_hidden()


def test_three_models_side_by_side(open_page: Opener, server: Server) -> None:
    page = open_page()
    generate(page, BLANKS, models=MODELS)
    assert page.locator(".pane h2").all_inner_texts() == list(MODELS)
    runs = [states(server, model=name, template=TEMPLATE, steps=8, seed=5) for name in MODELS]
    for step in (9, 4, 0):
        page.locator("#step").press("Home")
        for _ in range(step):
            page.locator("#step").press("ArrowRight")
        assert [shown(page, pane) for pane in range(3)] == [run[step] for run in runs]
    boxes = [page.locator(".pane").nth(i).bounding_box() for i in range(3)]
    assert boxes[0]["y"] == boxes[2]["y"] and boxes[0]["x"] < boxes[1]["x"] < boxes[2]["x"]
    assert "[]" not in runs[2][0] and runs[0][0].count("[]") == 7
    check_accessible(page)


def test_a_link_replays_the_same_generation(open_page: Opener) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    asked = {"models": MODELS[:2], "temperature": 0.7, "top_p": 0.9, "seed": "", "tokens": 12}
    generate(page, "It was — “so”", **asked)
    page.click("#link")
    page.wait_for_selector("text=Copied")
    link = page.evaluate("navigator.clipboard.readText()")
    again = open_page(link[link.index("#") :])
    finished(again)
    assert [shown(again, i) for i in range(2)] == [shown(page, i) for i in range(2)]
    assert again.input_value("#text") == "It was — “so”"
    assert again.input_value("#temperature") == "0.7" and again.input_value("#seed")
    other = re.sub(r"seed=\d+", "seed=77", link)
    again.goto(other)  # the same window, another fragment
    again.wait_for_selector(".facts:has-text('seed 77')")
    assert shown(again) != shown(page)


def test_a_link_says_only_what_differs(open_page: Opener, server: Server) -> None:
    page = open_page("#model=pocket-mdlm&text=It+was&seed=5&steps=8")
    finished(page)
    body = {"model": "pocket-mdlm", "template": "It was<mask:48>", "steps": 8, "seed": 5}
    assert shown(page) == states(server, **body)[-1]
    fields = {name: page.input_value(f"#{name}") for name in ("sampler", "temperature", "tokens")}
    assert fields == {"sampler": "ancestral", "temperature": "1", "tokens": "48"}
    assert page.locator("#notice").is_hidden()
    page.goto(page.url.replace("steps=8", "steps=6").replace("It+was", ""))
    page.wait_for_selector("#clock:has-text('/ 7')")
    assert page.input_value("#text") == "", "an empty text was asked for"


def test_a_link_asks_for_what_there_is_not(open_page: Opener) -> None:
    five = "&".join(f"model={name}" for name in (*MODELS, "fourth", "other"))
    page = open_page()
    page.wait_for_selector("[name=model]")
    link = f"#{five}&steps=8&sampler=magic&top_p=7&k=x&tokens=2.5&seed=5&text=It+was+____."
    page.evaluate("link => history.replaceState(null, '', link)", link)
    reload_with(page, lambda entries: entries.append({**entries[0], "id": "fourth"}))
    finished(page)
    assert page.locator(".pane").count() == 3 and page.locator(".error:visible").count() == 0
    said = page.inner_text("#notice")
    parts = (
        "no model other", "only 3 models", "sampler cannot be magic", "top_p cannot be 7",
        "k cannot be x", "tokens cannot be 2.5, it is 48",
    )  # fmt: skip
    for part in parts:
        assert part in said
    assert "steps" not in said and page.input_value("#sampler") == "ancestral"
    check_accessible(page)


def test_back_goes_to_the_generation_before(open_page: Opener) -> None:
    page = open_page()
    texts = []
    for seed in (5, 6):
        generate(page, BLANKS, seed=seed)
        texts.append(shown(page))
    assert texts[0] != texts[1]
    for go, seed in ((page.go_back, 5), (page.go_forward, 6)):
        go()
        page.wait_for_selector(f".facts:has-text('seed {seed}')")
        assert shown(page) == texts[seed - 5] and page.input_value("#seed") == str(seed)
    page.go_back()
    page.go_back()
    until(lambda: page.locator(".pane").count() == 0)
    assert page.locator("#player").is_hidden() and page.locator("#form").is_visible()


def test_limits_of_the_models_are_those_of_the_fields(open_page: Opener) -> None:
    page = open_page()
    limits = {MODELS[0]: {"max_steps": 16, "max_tokens": 24}, MODELS[1]: {"max_steps": 20}}

    def limited(entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            entry["xdlm"] = limits.get(entry["id"], {})

    reload_with(page, limited)
    page.wait_for_selector("[name=model]")
    there = {name: page.get_attribute(f"#{name}", "max") for name in ("steps", "tokens")}
    assert there == {"steps": "16", "tokens": "24"} and page.input_value("#steps") == "16"
    page.uncheck(f"[name=model][value={MODELS[0]}]")
    assert page.get_attribute("#steps", "max") == "20"
    page.fill("#steps", "21")
    page.click("#generate")
    assert page.locator("#steps:invalid").count() == 1 and page.locator(".pane").count() == 0


def test_saved_files(open_page: Opener, tmp_path: Path) -> None:
    page = open_page()
    generate(page, BLANKS)
    for name, start in (("html", b"<!doctype html>"), ("gif", b"GIF89a"), ("json", b"{")):
        with page.expect_download() as waiting:
            page.click(f"[data-format={name}]")
        assert waiting.value.suggested_filename == f"pocket-xdlm-5.{name}"
        waiting.value.save_as(tmp_path / f"run.{name}")
        assert (tmp_path / f"run.{name}").read_bytes().startswith(start)
    recording = read_recording(tmp_path / "run.json")
    last = recording.trajectory.frames[-1, 0].tolist()
    assert "".join(map(spelled, recording.pieces(last))) == shown(page)


def test_it_plays_by_itself_and_stops(open_page: Opener) -> None:
    page = open_page(reduced_motion="no-preference")
    page.wait_for_selector("[name=model]")
    page.fill("#text", "It was")
    page.fill("#steps", "40")
    page.locator("#text").press("Control+Enter")
    until(lambda: step_of(page) >= 3)
    assert page.inner_text("#play") == "Pause"
    page.click("#play")
    there = step_of(page)
    assert 3 <= there < 41
    page.wait_for_timeout(500)
    assert step_of(page) == there
    page.locator("h1").click()
    page.keyboard.press("Space")
    until(lambda: step_of(page) > there)


def test_stopping_ends_the_work(open_page: Opener, server: Server) -> None:
    server.idle()
    about = {"model": "pocket-xdlm", "outcome": "cancelled"}
    before = server.metric("xdlm_requests_total", **about)
    page = open_page()
    page.wait_for_selector("[name=model]")
    for other in (MODELS[0], MODELS[2]):
        page.uncheck(f"[name=model][value={other}]")
    for name, value in (("text", ""), ("steps", "1000"), ("tokens", "120")):
        page.fill(f"#{name}", value)
    page.click("#generate")
    until(lambda: page.get_attribute("#step", "max") != "0")
    page.click("#stop")
    finished(page)
    until(lambda: server.metric("xdlm_requests_total", **about) > before)
    server.idle()
    assert page.locator("#stop").is_hidden()
    assert page.inner_text("#status") == "Stopped" and page.inner_text(".facts") == "stopped"


def test_errors_are_told_where_they_belong(open_page: Opener) -> None:
    page = open_page(allowed="400")
    generate(page, BLANKS, models=MODELS[1:], sampler="confidence")
    errors = page.locator(".error")
    assert errors.nth(0).is_hidden() and "noise has none" in errors.nth(1).inner_text()
    assert "[]" not in shown(page, 0)
    check_accessible(page)


def test_a_server_with_a_key(open_page: Opener) -> None:
    for server in started("--api-key", "abc"):
        page = open_page(at=server, allowed="401")
        page.wait_for_selector("#key-field:not([hidden])")
        check_accessible(page)
        page.fill("#key", "wrong")
        page.keyboard.press("Tab")
        page.wait_for_selector("#notice:has-text('key')")
        page.fill("#key", "abc")
        page.keyboard.press("Enter")
        page.wait_for_selector("[name=model]")
        page.fill("#text", "It was ____.")
        page.click("#generate")
        finished(page)
        assert shown(page).startswith("It was") and "[]" not in shown(page)
        assert page.locator("#key-field").is_hidden() and "abc" not in page.url


def test_on_a_phone(open_page: Opener, tmp_path: Path) -> None:
    page = open_page(
        viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True, color_scheme="dark",
        device_scale_factor=2,
    )  # fmt: skip
    generate(page, BLANKS, models=MODELS)
    assert page.locator("#player").bounding_box()["y"] < 100, "results come into sight"
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390, "nothing sticks out"
    boxes = [page.locator(".pane").nth(i).bounding_box() for i in range(3)]
    assert boxes[0]["y"] < boxes[1]["y"] < boxes[2]["y"]
    assert page.locator("#generate").bounding_box()["height"] >= 40
    page.locator(".tokens span").nth(3).tap()
    assert "%" in page.inner_text("#history")
    check_accessible(page)
    page.screenshot(path=tmp_path / "phone.png")
    size = (tmp_path / "phone.png").stat().st_size
    assert size > 20_000, "there is something on it"
