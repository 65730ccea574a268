"""Blocks between markers: replaced and nothing else, and as the blessed records have them."""

import argparse
import ast
import re

import pytest

from repro.door.command_line import build_parser
from repro.report import page_blocks
from repro.report.command_reference import command_rows
from repro.report.page_blocks import renew_blocks, renewed_readme
from repro.run.places import PACKAGE, expected_folder

ROOT = PACKAGE.parent
PAGES = ("README.md", "kernels/README.md", *(f"docs/{name}.md" for name in
         ("claims", "commands", "contributing", "learning", "systems")))  # fmt: skip


def test_a_block_is_replaced_and_nothing_else():
    text = "before\n<!-- a:begin (by a command) -->\nold\n<!-- a:end -->\nafter\n"
    renewed = renew_blocks(text, {"a": lambda: ["new"]})
    assert renewed == text.replace("old\n", "\nnew\n\n")
    assert renew_blocks(renewed, {"a": lambda: ["new"]}) == renewed
    with pytest.raises(ValueError, match="no block"):
        renew_blocks("nothing here", {"a": lambda: ["new"]})
    with pytest.raises(ValueError, match="'a' is unknown"):
        renew_blocks(text, {"kernels": lambda: ["new"]})


@pytest.mark.parametrize("name", PAGES)
def test_measured_tables_are_those_of_the_blessed_records(name, every_blessed, monkeypatch):
    page = ROOT / name
    if not page.is_file():
        pytest.skip(f"{name} is not part of an installed package")
    monkeypatch.setattr(page_blocks, "blessed_checks", lambda expected, *names: every_blessed)
    renewed = renewed_readme(page, expected_folder(None))
    assert renewed == page.read_text(encoding="utf-8"), (
        f"stale: python -m repro report --readme {name} renews it"
    )


def test_every_page_is_in_the_sites_contents_and_links_lead_somewhere():
    docs = ROOT / "docs"
    if not docs.is_dir():
        pytest.skip("docs/ is not part of an installed package")
    text = (docs / "index.md").read_text(encoding="utf-8")
    listed = re.findall(r"^(?:.* <)?(\w+)>?$", text, re.MULTILINE)
    assert {page.stem for page in docs.glob("*.md")} - {"index"} == set(listed)
    for page in [ROOT / "README.md", ROOT / "kernels" / "README.md", *docs.glob("*.md")]:
        for link in _local_links(page.read_text(encoding="utf-8")):
            path, _, heading = link.partition("#")
            place = page.parent / path if path else page
            # The site has the page of kernels by including it.
            place = ROOT / "kernels" / "README.md" if place.name == "kernels.md" else place
            assert place.exists(), f"{page.name} links {link}"
            if heading:
                assert heading in _headings(place.read_text(encoding="utf-8")), link


def test_the_tour_of_the_source_names_functions_that_are_there():
    page = ROOT / "docs" / "architecture.md"
    if not page.is_file():
        pytest.skip("docs/ is not part of an installed package")
    tour = page.read_text(encoding="utf-8").split("\n## ")[0]
    stops = re.findall(r"^\d+\. \*\*.*?\]\(\.\./(\S+?\.py)\)(?:, `(\w+)`)?", tour, re.MULTILINE)
    assert len(stops) == 10
    assert sum(bool(name) for _, name in stops) >= 7
    for file, name in stops:
        source = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert not name or name in {
            node.name for node in ast.walk(source) if isinstance(node, ast.FunctionDef)
        }, f"{page.name}: {file} has no {name}"


def test_the_reference_has_every_command_and_option_once():
    parser = build_parser()
    text = "\n".join(command_rows(parser))
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    listed = re.findall(r"^- `(--[\w-]+)", text, re.MULTILINE)
    shared = re.findall(r"`(--[\w-]+)`", text)
    assert re.findall(r"^### (\w+)$", text, re.MULTILINE) == [*commands.choices]
    for name, one in commands.choices.items():
        flags = {o for a in one._actions for o in a.option_strings} - {"-h", "--help"}
        assert flags <= {*listed, *shared}, name


def _local_links(text):
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in links if not link.startswith(("http", "site:"))]


def _headings(text):
    """Return the anchors that headings have on GitHub."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
