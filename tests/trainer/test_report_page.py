"""The page of a run in a real browser: what it draws, what the filters and the zoom do, what never runs."""

import json
import random
import re

import pytest

from roost.trace.chrome import write_trace
from roost.trainer.records.run_folder import RunFolder
from roost.trainer.report.page import page_file, write_report
from tests.browser import needs_chromium, opened_browser
from tests.trainer.example_run import NASTY, STEPS, UNKNOWN_REWARDS, make_run, measured, workers
from tests.trainer.pathologies import recorded

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser():
    with opened_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def reports():
    """Reports by the folder of their run, each written once."""
    return {}


@pytest.fixture
def show(browser, reports):
    """Opens a run's page; anything that it asks for, or any error in it, fails the test."""
    browser.troubles = []

    def opened(run, **options):
        if run.path not in reports:
            reports[run.path] = write_report(run)
        page = browser.open(reports[run.path], **options)
        page.wait_for_selector("#rollouts h2")
        return page

    yield opened
    assert browser.troubles == []


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"))


def points(page, selector):
    """Number of points of the line that a selector finds."""
    return len(re.findall(r"[ML]", page.locator(selector).get_attribute("d")))


def shown_window(page):
    canvas = page.locator("#timeline canvas")
    canvas.and_(page.locator("[data-to]")).wait_for()
    return int(canvas.get_attribute("data-from")), int(canvas.get_attribute("data-to"))


class TestFigures:
    def test_header(self, show, run):
        header = show(run).inner_text("header")
        for words in ("sums", "disaggregated", "1 node, 4 accelerators", f"{STEPS} steps", "4 min 0 s"):
            assert words in header

    def test_the_tiles_say_what_was_measured(self, show, run):
        rewards = [step["reward/mean"] for step in run.steps() if step["reward/mean"] is not None]
        tiles = dict(
            text.split("\n")[:2]
            for text in show(run)
            .locator(".tile")
            .evaluate_all(
                "all => all.map(one => `${one.children[0].textContent}\\n${one.querySelector('b').textContent}`)"
            )
        )
        assert float(tiles["first reward"]) == pytest.approx(rewards[0], rel=0.01)
        assert float(tiles["last reward"]) == pytest.approx(rewards[-1], rel=0.01)
        assert float(tiles["best reward"]) == pytest.approx(max(rewards), rel=0.01)
        assert float(tiles["evaluation"]) == pytest.approx(run.evaluations()[-1]["reward/mean"], rel=0.01)

    def test_the_curve_has_a_point_for_each_step(self, show, run):
        page = show(run)
        assert points(page, "#reward path.each") == STEPS - len(UNKNOWN_REWARDS)
        assert points(page, "#reward path.smooth") == STEPS
        assert page.locator("#reward .points path").count() == len(run.evaluations())

    def test_small_charts_and_everything_else(self, show, run):
        page = show(run)
        titles = page.locator("#small h3").all_inner_texts()
        assert titles == [
            "Policy staleness",
            "Policy loss",
            "Gradient norm",
            "Entropy",
            "Learner and engine apart",
            "Tokens a second",
        ]
        assert points(page, "#small section:nth-child(3) path.line") == STEPS - 1, "one norm was infinite"
        page.click("#more summary")
        page.wait_for_selector("#more path.line")
        assert "samples/cancelled" in page.locator("#more h3").all_inner_texts()

    @pytest.mark.parametrize(
        ("low", "high", "labels"),
        [
            (0.41, 0.59, ["0.5"]),  # one gridline alone
            (0, 1, ["0.0", "0.5", "1.0"]),
            (0, 500, ["0", "500"]),
            (1_000_000, 1_100_000, ["1.00e+6", "1.05e+6", "1.10e+6"]),
            (0.0000102, 0.0000104, ["1.02e-5", "1.03e-5", "1.04e-5"]),
            (0, 3e-6, ["0", "2e-6"]),
        ],
    )
    def test_labels_of_an_axis(self, show, run, low, high, labels):
        gridlines = f"""([low, high]) => {{
            {page_file("numbers.js")}
            const {{ values, step }} = ticks(low, high, 2);
            return values.map((value) => spellTick(value, step));
        }}"""
        assert show(run).evaluate(gridlines, [low, high]) == labels

    def test_the_only_gridline_of_a_chart(self, show, tmp_path):
        run = RunFolder.create(tmp_path / "narrow", "steps: 2", "{}")
        for step, entropy in enumerate((0.42, 0.58), 1):
            run.add_step({"step": step, "entropy": entropy})
        labels = show(run).locator("#small section", has_text="Entropy").locator(".axes text[text-anchor=end]")
        assert labels.all_text_contents() == ["0.5"]

    def test_diagnoses_and_tokens(self, show, run, tmp_path):
        page = show(run)
        assert page.locator("#diagnoses").is_hidden() and page.locator("#tokens").is_hidden()
        sick = RunFolder.create(tmp_path / "sick", "steps: 20", "{}")
        for row in recorded("length"):
            sick.add_step(row)
        sick.add_tokens([{"step": 3, "token": NASTY, "before": "17+", "ratio": 0.25, "position": 2}])
        page = show(sick)
        assert "length explosion: mean tokens" in page.inner_text("#diagnoses")
        page.click("#tokens summary")
        cells = page.locator("#tokens td").all_inner_texts()
        assert cells[:2] == ["3", "0.250"] and cells[3:] == ["17+", "2"] and "<script>" in cells[2]

    def test_pointing_marks_the_step_in_all_charts(self, show, run):
        page = show(run)
        page.hover("#reward svg", position={"x": 400, "y": 100})
        assert re.match(r"step \d+\n", page.inner_text("#tip"))
        assert page.locator(".marker[visibility=visible]").count() == page.locator(".marker").count() > 5
        page.mouse.move(5, 5)
        assert page.locator(".marker[visibility=visible]").count() == 0

    def test_where_the_time_went(self, show, run):
        page = show(run)
        totals = {row.split()[0]: row.split()[-2] for row in page.locator(".totals tr").all_inner_texts()}
        assert list(totals) == ["generate", "score", "learn", "sync", "switch", "other"]
        assert 60 <= float(totals["generate"]) <= 65
        assert page.locator("#times .stack rect").count() >= STEPS * 5

    def test_how_busy(self, show, run):
        rows = show(run).locator(".busy-row").all_inner_texts()
        assert [row.split("\n")[0] for row in rows] == ["actor", "rollout", *(f"accelerator {n}" for n in range(4))]
        assert rows[4].split("\n")[-1] == "60 %"


class TestTimeline:
    def test_lanes_zoom_and_way_back(self, show, run):
        page = show(run)
        names = page.locator(".lane-name").all_inner_texts()
        assert names[:2] == ["node 0 (alpha)", "accelerator 0"] and names[-1] == "rollout 1"
        everything = shown_window(page)
        page.click("[data-zoom=in]")
        page.wait_for_function(
            "from => Number(document.querySelector('canvas').dataset.from) > from", arg=everything[0]
        )
        closer = shown_window(page)
        assert closer[1] - closer[0] == pytest.approx((everything[1] - everything[0]) / 2, abs=2)
        page.locator("#timeline canvas").press("0")
        page.wait_for_function("() => Number(document.querySelector('canvas').dataset.from) === 0")
        assert shown_window(page) == everything

    def test_a_span_says_what_it_is(self, show, run):
        page = show(run)
        canvas = page.locator("#timeline canvas")
        canvas.and_(page.locator("[data-to]")).wait_for()
        for _ in range(5):
            page.click("[data-zoom=in]")
        canvas.scroll_into_view_if_needed()
        height = canvas.bounding_box()["height"]
        for x in range(10, 900, 25):  # a span of the last lane, wherever it is
            canvas.hover(position={"x": x, "y": height - 30})
            if page.locator("#tip").is_visible():
                break
        assert "generate\nrollout 1" in page.inner_text("#tip")

    def test_a_hundred_thousand_spans(self, show, tmp_path):
        run = make_run(tmp_path, steps=2)
        write_trace(run.trace_file, workers(200, pieces=130), {0: "alpha"})
        page = show(run)
        shown_window(page)
        assert int(page.locator("#timeline canvas").get_attribute("data-drawn")) > 100
        reported = page.inner_text("#timeline .said")
        assert "105,600 spans" in reported and "are drawn together" in reported
        assert run.report_file.stat().st_size < 2_000_000


class TestRollouts:
    def rows(self, page):
        return [row.split("\t") for row in page.locator("table.rollouts tbody tr").all_inner_texts()]

    def test_before_and_after(self, show, run):
        page = show(run)
        heads = page.locator(".pairs th").all_inner_texts()
        assert heads == ["task", "before, step 1", f"after, step {STEPS}"]
        assert page.locator(".pairs .task").all_inner_texts() == ["3+4=", "17+25=", "8*7="]

    def test_images_of_a_sample_are_shown(self, show, tmp_path):
        run = make_run(tmp_path, steps=2)
        pixel = (
            "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJ"
            "RU5ErkJggg=="
        )
        run.add_samples(
            [{"step": 2, "task": "[image]what?", "images": [pixel, "https://example.com/a.png"], "reward": 1.0}]
        )
        page = show(run)
        images = page.locator(".images img")
        assert images.count() == 1
        assert images.first.evaluate("image => image.decode().then(() => image.naturalWidth)") == 1

    def test_sorted_by_step_and_more_on_demand(self, show, run):
        page = show(run)
        steps = [int(row[0]) for row in self.rows(page)]
        assert len(steps) == 60 and steps == sorted(steps)
        page.click("#more-rollouts")
        assert len(self.rows(page)) == 120

    def test_the_slider_picks_a_step(self, show, run):
        page = show(run)
        slider = page.locator("#step-slider")
        assert int(slider.get_attribute("max")) == STEPS
        slider.fill("10")
        assert page.inner_text("#step-said") == "step 10"
        assert {row[0] for row in self.rows(page)} == {"10"}
        assert page.inner_text("#rollout-count") == "6 rollouts"
        page.select_option("#rollout-kind", "evaluation")
        assert [row[2].strip() for row in self.rows(page)] == ["3+4=", "17+25=", "8*7="]
        slider.fill("0")
        assert {row[1].strip() for row in self.rows(page)} == {"evaluation"}

    def test_texts_are_found(self, show, run):
        page = show(run)
        page.fill("#rollout-search", "17+25")
        kept = [sample for sample in run.sample_lines if sample["task"] == "17+25="]
        assert page.inner_text("#rollout-count") == f"{len(kept)} rollouts"
        page.fill("#rollout-search", "no such text")
        assert self.rows(page) == []

    def test_what_models_write_is_text(self, show, run):
        page = show(run)
        page.fill("#rollout-search", "onerror")
        assert page.inner_text("#rollout-count") == "1 rollout"
        seen = page.locator("td.of-completion").first.inner_text()
        assert seen.startswith("<script>alert('run')</script><img src=x")
        assert "{{data}}" in seen and NASTY.startswith(seen[:40])
        assert page.locator("td img, td script").count() == 0

    def test_what_each_reward_gave(self, show, tmp_path):
        run = make_run(tmp_path, steps=1)
        run.add_samples(
            [
                {
                    "step": 1,
                    "kind": "train",
                    "task": "t",
                    "completion": "once",
                    "reward": 2,
                    "parts": {"<b>exact": 1, "p": 0.25},
                }
            ]
        )
        page = show(run)
        page.fill("#rollout-search", "once")
        assert page.locator("td.of-reward").first.inner_text().split() == ["2", "<b>exact", "1", "p", "0.250"]

    def test_the_whole_conversation_is_one_click_away(self, show, tmp_path):
        run = make_run(tmp_path, steps=1)
        reported = [
            {"role": "user", "content": "add 2 and 2 <img src=x onerror=alert(1)>", "generated": False},
            {"role": "assistant", "content": "thinking\nfour", "generated": True, "finish": "length", "tokens": 7},
        ]
        sample = {
            "step": 1,
            "kind": "train",
            "task": "t",
            "completion": "4",
            "reward": 1,
            "truncated": True,
            "tokens": 7,
        }
        run.add_samples([{**sample, "messages": reported}])
        page = show(run)
        page.fill("#rollout-search", "thinking")
        assert page.inner_text("#rollout-count") == "1 rollout", "it is found by what the policy said"
        assert page.locator("td.of-tokens").first.inner_text().split() == ["7", "truncated"]
        folded = page.locator("details.conversation")
        assert folded.inner_text().strip() == "2 messages, 1 turn generated"
        folded.locator("summary").click()
        page.locator(".message.generated").wait_for()
        roles, texts = folded.locator(".role"), folded.locator(".text")
        assert [" ".join(text.split()) for text in roles.all_inner_texts()] == ["user", "assistant 7 tokens · length"]
        assert texts.all_inner_texts() == ["add 2 and 2 <img src=x onerror=alert(1)>", "thinking\nfour"]

    def test_a_huge_text_is_folded(self, show, run):
        page = show(run)
        page.fill("#rollout-search", "characters omitted")
        text = page.locator("td.of-completion details")
        assert len(text.inner_text()) < 300
        text.locator("summary").click()
        assert "296,000 characters omitted" in text.inner_text()


class TestPage:
    def test_config_plan_and_files(self, show, run):
        page = show(run)
        assert not page.locator("#config pre").is_visible()
        page.click("#config summary")
        assert page.inner_text("#config pre") == "trainer:\n  steps: 60\n"
        page.click("#plan summary")
        assert json.loads(page.inner_text("#plan pre"))["mode"] == "disaggregated"
        links = page.locator("#files a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
        assert {"./metrics.jsonl", "./samples.jsonl", "./trace.json"} <= set(links)
        assert all((run.path / link).exists() for link in links)

    @pytest.mark.parametrize(
        "steps", [pytest.param([], id="none"), pytest.param([{"step": 1}], id="empty"),
                  pytest.param([{"step": 7, "reward/mean": 0.5}], id="one"),
                  pytest.param([{"step": 1, "reward/mean": None}, {"step": 2, "reward/mean": None}], id="no-numbers"),
                  pytest.param([{"step": n, "reward/mean": 1e30 * n, "time/x": 1e-9} for n in (1, 2)], id="extremes")]
    )  # fmt: skip
    def test_a_run_with_hardly_anything(self, show, tmp_path, steps):
        run = RunFolder.create(tmp_path / "run", config="", plan="{}")
        for step in steps:
            run.add_step(step)
        page = show(run)
        assert "There is no trace" in page.inner_text("#timeline")
        assert "No rollouts were kept" in page.inner_text("#rollouts")
        assert page.inner_text("#step-count") == f"{len(steps)} step{'s' if len(steps) != 1 else ''}"
        if not any(step.get("reward/mean") for step in steps):
            assert "Nothing was measured yet" in page.inner_text("#reward")

    def test_ten_thousand_steps(self, show, tmp_path):
        run = RunFolder.create(tmp_path / "long", config="", plan="{}")
        chance = random.Random(1)
        run.metrics.append({**measured(step, chance), "reward/mean": 0.5} for step in range(1, 10_001))
        page = show(run)
        assert points(page, "#reward path.each") == 10_000
        assert page.locator("#times .stack rect").count() < 3_000, "a bar is the mean of several steps"

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_light_and_dark(self, show, run, scheme):
        page = show(run, color_scheme=scheme)
        paper, ink = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        light = sum(map(int, re.findall(r"\d+", paper))) > sum(map(int, re.findall(r"\d+", ink)))
        assert light == (scheme == "light")

    def test_a_phone(self, show, run):
        page = show(run, viewport={"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
