"""The report: what it says, and how it looks in a real browser, on a phone and on a desk, by day and by night."""

import json
import os
import re
import shutil

import numpy as np
import pytest

from deltagram.experiments.charts import Scale, percent, plain
from deltagram.experiments.conclude import conclude
from deltagram.experiments.read_plan import parse_plan
from deltagram.experiments.records import create

PLAN = """
name = "kernels"
question = "Does the <new> kernel shorten a decode step & at which batch?"
[design]
margin = 0.01
blocks = 6
[arm.A]
label = "old kernel, as on main, with a label that is long enough to need more than one line on a phone"
command = "run --kernel old --trace {trace}"
[arm.B]
label = "new kernel"
command = "run --kernel new --trace {trace}"
[measure]
kind = "step"
"""
CELLS = "".join(f'[[cell]]\nname = "batch-{n}"\n' for n in (1, 8, 32))
FACTORS = {"batch-1": 1.03, "batch-8": 1.0, "batch-32": 0.96}


def write_record(folder, factors, spread=0.004, bad=(), source=PLAN, until=6, aa=False, seed=1):
    """A record with made launches, concluded: its folder."""
    rng, plan = np.random.default_rng(seed), parse_plan(source, folder)
    record = create(folder / "records", plan, aa)
    for block, orders in enumerate(record.experiment["orders"][:until]):
        for cell in plan.cells:
            for position, arm in enumerate(orders[cell.name]):
                number = 10.0 * rng.normal(1, spread) / (factors[cell.name] if arm == "B" else 1.0)
                steps = np.percentile(number * rng.normal(1, 0.03, 400), (0, 5, 25, 50, 75, 95, 100)).tolist()
                place = record.new_launch_folder(block, position, arm, cell.name)
                launch = {"folder": place.name, "cell": cell.name, "block": block, "position": position, "arm": arm}
                launch |= {"state": "ok", "reason": "", "number": number, "quantiles": steps, "seconds": 21.0}
                launch |= {"facts": {}, "beside": {"p95_ms": steps[5], "mean_ms": number}, "started": "x", "ended": 0.0}
                record.write_launch(launch)
    for state, rule, reason in bad:
        place = record.new_launch_folder(0, 0, "A", plan.cells[0].name)
        launch = {
            "folder": place.name,
            "cell": plan.cells[0].name,
            "block": 0,
            "position": 0,
            "arm": "A",
            "started": "x",
        }
        record.write_launch(launch | {"state": state, "rule": rule, "reason": reason, "facts": {}})
    record.set_state("done" if until == 6 else "interrupted", "" if until == 6 else "stopped from outside")
    conclude(plan, record)
    return record.folder


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """These records need not survive a power cut: 72 launches are as many waits for a disk that may be busy."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


BAD = [
    ("invalid", "output_digest", "1 of 1 outputs differ, all first"),
    ("died", None, "it was ended by signal 9; it last wrote: " + "CUDA error <out of memory> " * 8),
]


@pytest.fixture
def cells_report(tmp_path):
    return write_record(tmp_path, FACTORS, bad=BAD, source=PLAN + CELLS) / "report.html"


@pytest.fixture
def unresolved_report(tmp_path):
    return write_record(tmp_path, {"all": 1.004}, spread=0.016, seed=11) / "report.html"


def text_of(page):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.split("</style>")[1]))


def test_the_page_says_it_all(cells_report):
    page = cells_report.read_text()
    text = text_of(page)
    assert text.index("faster in batch-1, slower in batch-32, equivalent in batch-8") < text.index(
        "Interval and margin"
    )
    for part in (
        "Does the &lt;new&gt; kernel", "old kernel, as on main", "output_digest", "signal 9", "No A/A run of this plan",
        "ABBA or BAAB at random", "run --kernel new --trace {trace}", "72 launches", "throttled = true (not checked",
    ):  # fmt: skip
        assert part in text, part
    for name in FACTORS:
        assert f"Blocks: {name}" in text and f"Launches: {name}" in text
    result = json.loads((cells_report.parent / "result.json").read_text())
    assert [len(cell["log_ratios"]) for cell in result["cells"].values()] == [6, 6, 6]
    assert page.count('class="block"') == 18 and page.count('class="box"') == 72
    assert not re.search(r"(src|href)=|@import|url\(|<script", page)  # nothing from anywhere


def test_an_unresolved_cell_is_told_what_would_resolve_it(unresolved_report):
    text = text_of(unresolved_report.read_text())
    result = json.loads((unresolved_report.parent / "result.json").read_text())["cells"]["all"]
    assert result["verdict"] == "unresolved"
    assert f"resolution reached ±{plain(result['resolution'])}" in text and "What would resolve it" in text
    assert f"{result['blocks_to_show_a_difference']} blocks to show a difference" in text.replace("  ", " ")
    assert "Or a steadier machine" in text and "Not by adding blocks" in text


def test_an_unfinished_record_has_a_page(tmp_path):
    text = text_of((write_record(tmp_path, {"all": 1.0}, until=3) / "report.html").read_text())
    assert "No verdict yet" in text and "interrupted after 3 of 6 blocks" in text and "stopped from outside" in text


def test_an_aa_page_speaks_of_the_environment(tmp_path):
    text = text_of((write_record(tmp_path, {"all": 1.0}, aa=True) / "report.html").read_text())
    assert (
        "A/A: no difference, as it should be" in text
        and "floor ±" in text
        and "new kernel" not in text.split("plan.toml")[0]
    )
    text = text_of((write_record(tmp_path, {"all": 1.05}, aa=True) / "report.html").read_text())
    assert "A/A: arm A came out faster than itself" in text


def test_numbers_keep_their_digits():
    assert percent(0.0213) == "+2.1 %" and percent(-0.0213) == "−2.1 %" and percent(0.0) == "+0.0 %"
    assert percent(0.00042) == "+0.04 %" and plain(-0.5) == "50.0 %"
    assert Scale(-0.0245, 0.0245).ticks() == pytest.approx([-0.02, -0.01, 0.0, 0.01, 0.02])
    assert Scale(9.62, 10.4).ticks() == pytest.approx([9.8, 10.0, 10.2, 10.4])


@pytest.fixture(scope="module")
def browser():
    binary, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if binary is None or driver is None:
        if os.environ.get("CI"):
            pytest.fail("no chromium and chromedriver, which CI installs")
        pytest.skip("no chromium and chromedriver on this machine (Debian: chromium chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield window
    window.quit()


# Contrast of every text with what is behind it, and whether it can be read at all (WCAG 2: 4.5 for small text).
LOOK = """
const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
const colour = s => s.match(/[\\d.]+/g).map(Number);
const behind = e => { for (; e; e = e.parentElement) { const c = colour(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0.99) return c; } return [255, 255, 255]; };
const found = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode, e = node.parentElement, box = e.getBoundingClientRect();
  if (!node.textContent.trim() || !box.width || e.closest('title')) continue;
  const style = getComputedStyle(e), a = light(colour(style.color)), b = light(behind(e));
  found.push({text: node.textContent.trim().slice(0, 40), size: parseFloat(style.fontSize),
    contrast: (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05),
    right: e.closest('.scroll,pre') ? 0 : box.right, left: e.closest('.scroll,pre') ? 0 : box.left});
}
return {found, width: document.documentElement.scrollWidth, inner: innerWidth,
  word: document.querySelector('.word').getBoundingClientRect().bottom,
  resources: performance.getEntriesByType('resource').length,
  plots: [...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width)};
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("kind", ["cells_report", "unresolved_report"])
def test_it_reads_well_in_a_browser(browser, request, kind, width, scheme):
    page = request.getfixturevalue(kind)
    metrics = {"width": width, "height": 740, "deviceScaleFactor": 2, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    look = browser.execute_script(LOOK)
    assert look["width"] <= look["inner"] == width  # nothing to scroll sideways
    assert look["word"] < 400  # the verdict is on the first screen
    assert look["resources"] == 0 and browser.get_log("browser") == []
    assert len(look["found"]) > 80
    for text in look["found"]:
        assert text["contrast"] >= 4.5 and text["size"] >= 12.0, text
        assert text["left"] >= -1 and text["right"] <= width + 1, text
    assert look["plots"] and min(look["plots"]) > (200 if width == 360 else 600)
    background = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", background))) < 60) == (scheme == "dark")


def test_rows_open_and_marks_explain_themselves(browser, cells_report):
    browser.get(cells_report.as_uri())
    summary = browser.find_element("css selector", "details > summary")
    assert not browser.find_elements("css selector", "details[open]")
    summary.click()
    assert browser.find_elements("css selector", "details[open]")
    titles = [e.get_attribute("textContent") for e in browser.find_elements("css selector", "svg title")]
    assert any(re.fullmatch(r"block 3 \((ABBA|BAAB)\): [+−]\d+\.\d+ %", title) for title in titles)
