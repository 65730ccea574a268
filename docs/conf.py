"""Sphinx settings of the site: `nox -s docs` builds it, and every warning is an error."""

from __future__ import annotations

project = "qerl-repro"
author = "the qerl-repro contributors"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["figures/**"]
templates_path = ["templates"]

# Flags keep their two dashes.
smartquotes = False
myst_heading_anchors = 4
# A link to what only the site has; elsewhere it is shown as text.
myst_url_schemes = {"http": None, "https": None, "site": "{{path}}"}

html_theme = "furo"
html_title = "qerl-repro"
html_static_path: list[str] = []
html_show_sphinx = False
html_copy_source = False
# What `nox -s docs` writes before.
html_extra_path = ["../runs/site-pages"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "all_claims.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
