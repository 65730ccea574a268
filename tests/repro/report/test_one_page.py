"""The page of HTML: self-contained, with every row, and in a real browser it filters and fits."""

import dataclasses
import os
import re
import shutil
import subprocess

import pytest
from markupsafe import escape

from repro.__main__ import main
from repro.judge.blessed import untested_checks
from repro.report.one_page import ABSENT, interval_marks, page_text, seed_marks
from repro.report.readme import answer_lines, answers
from repro.report.tidy import statements
from repro.report.verdict_words import Kind
from repro.run.places import expected_folder

EXPECTED = expected_folder(None)
BROWSERS = "chromium", "chromium-browser", "google-chrome", "chrome"
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
# Writes into the page's title how wide it is, how many rows are seen, and what failed.
PROBE = """<script>
document.querySelectorAll(".row:not([hidden])").forEach(row => { row.open = true; });
document.title = [document.documentElement.scrollWidth, innerWidth,
  rows.filter(row => row.checkVisibility()).length,
  getComputedStyle(document.body).backgroundColor,
  [...form.children].map(part => part.getBoundingClientRect())
    .filter((part, at, every) => !at || part.top >= every[at - 1].bottom).length,
  Number(document.getElementById("reported").checkVisibility()),
  ].join(";");
</script></body>"""


@pytest.fixture(scope="module")
def page(every_blessed, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    text = page_text(every_blessed, EXPECTED, [])
    path.write_text(text.replace("</body>", PROBE), encoding="utf-8")
    return path


def test_the_page_asks_for_nothing_and_has_every_row(every_blessed, page):
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href|action)\s*=\s*["'](?!#)|url\(|@import|fetch\(""", text)
    rows = [row for row in statements(every_blessed, EXPECTED) if row.device]
    assert text.count('<details class="row" data-kind') == len(rows)
    assert {row.command for row in rows} <= set(re.findall(r"<code>(.*?)</code>", text))


def test_the_answer_comes_first_and_of_each_target_the_papers_claims(every_blessed, page):
    text = page.read_text(encoding="utf-8")
    lines = answer_lines(answers(every_blessed, EXPECTED), ABSENT)
    assert sum(map(len, lines.values())) == len(answers(every_blessed, EXPECTED)) >= 9
    for claims in lines.values():
        answer = str(escape(" ".join(claims)))
        assert text.index("<h1>") < text.index(answer) < text.index('<form id="filter"')
    targets = re.split(r'<section class="target">', text)[1:]
    order = [kind.value for kind in Kind]
    for target in targets:
        kinds = [order.index(kind) for kind in re.findall(r'data-kind="([^"]+)"', target)]
        assert kinds == sorted(kinds)


def test_claims_of_the_paper_without_any_run_have_rows_after_the_others(every_blessed):
    untested = untested_checks(EXPECTED, every_blessed)
    known = {(one.selection.target.name, one.selection.tier) for one in every_blessed}
    assert not known & {(one.selection.target.name, one.selection.tier) for one in untested}
    rows = [row for row in statements(untested, EXPECTED) if row.kind == Kind.PAPER.value]
    assert {row.status for row in rows} == {"not run"}
    assert any(row.name == "nvfp4_lora_aqn.accuracy" and row.target == "table1" for row in rows)
    text = page_text([], EXPECTED, [], untested)
    assert text.count('data-status="not run"') == text.count("no run is stored") == len(rows)


def test_what_records_say_is_text_not_html(blessed_of):
    checked = blessed_of("table6")
    bad = dataclasses.replace(checked.verdicts[0], sentence="<script>alert(1)</script>")
    verdicts = [bad, *checked.verdicts[1:]]
    text = page_text([dataclasses.replace(checked, verdicts=verdicts)], EXPECTED)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "<dt>Paper</dt><dd>1.27x" in text
    values = checked.evidence.values("tokens_per_second_7b_8")["bf16_lora"]
    assert all(f": {value:.5g}" in text for value in values.values())


def test_marks_lie_in_the_order_of_their_values(blessed_of):
    checked = blessed_of("table6")
    rows = statements([checked], EXPECTED)
    (row,) = [r for r in rows if r.kind == Kind.PAPER.value and r.name.endswith("_8")]
    marks = interval_marks(row)
    assert 0 < marks["none"] < marks["paper"] < marks["low"] < marks["effect"] < marks["high"] < 100
    assert (marks["least"], marks["most"]) == (1.0, row.high)
    assert f"<span>{marks['most']:.3g}</span>" in page_text([checked], EXPECTED)
    assert interval_marks(dataclasses.replace(row, low=None)) == {}
    # Every seed of each arm has one.
    place = (row.target, row.tier, row.device)
    slow, fast = ((*place, arm, row.metric) for arm in row.arms.split())
    seeds = {slow: [("0", 1.0), ("1", 2.0)], fast: [("0", 5.0)]}
    assert seed_marks(row, seeds) == ([[3.0, 26.5], [97.0]], (1.0, 5.0))
    assert seed_marks(row, {slow: [("0", 1.0), ("1", 1.0)], fast: [("0", 1.0)]}) == ([], ())


def test_the_command_writes_the_page_of_its_targets(tmp_path):
    out = tmp_path / "page.html"
    assert main(["report", "table6", "--html", str(out)]) == 0
    assert "table6" in out.read_text(encoding="utf-8")
    assert "table9" not in re.findall(r"reproduce (\w+)", out.read_text(encoding="utf-8"))


def seen(page, width, fragment="", *, dark=False):
    """Return what the probe writes: width of the page and the window, rows seen, background."""
    if BROWSER is None:
        pytest.skip("no Chromium is installed")
    line = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    line += [f"--window-size={width},900", f"--user-data-dir={page.parent / 'profile'}"]
    line += ["--blink-settings=preferredColorScheme=0"] if dark else []
    address = page.as_uri() + fragment
    environment = dict(os.environ, HOME=str(page.parent))
    shown = subprocess.run(
        [*line, address], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    found = re.search(r"<title>([\d;.rgb(), ]+)</title>", shown.stdout)
    assert found, shown.stderr[-500:]
    return found[1].split(";")


@pytest.mark.parametrize("width", [500, 1280])
def test_a_browser_shows_every_row_within_its_window(page, every_blessed, width):
    wide, window, rows, light, lines, _ = seen(page, width)
    assert int(wide) <= int(window)
    assert int(rows) == sum(bool(row.device) for row in statements(every_blessed, EXPECTED))
    assert light != seen(page, width, dark=True)[3]
    assert (int(lines) == 1) == (width == 1280), "the filters stand on one line where there is room"


def test_in_a_browser_the_address_filters_as_the_form_does(page, every_blessed):
    rows = statements(every_blessed, EXPECTED)
    wanted = [
        row
        for row in rows
        if row.status == "contradicted" and row.device == "nvidia_h200" and row.target == "figure11"
    ]
    fragment = "#status=contradicted&device=nvidia_h200&words=figure11"
    *_, rows_seen, _, _, others = seen(page, 1280, fragment)
    assert int(rows_seen) == len(wanted) == 6
    assert others == "1", "what never had rows is not filtered away"
