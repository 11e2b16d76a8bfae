"""The site: it builds without a warning, is complete, and takes nothing from anywhere else."""

import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from documents import ROOT

_LOADING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "object": "data"}
_PAGES_LINKED = {"canonical", "next", "prev"}
"""What a ``link`` element may name without anything being loaded from there."""


@dataclass
class Page(HTMLParser):
    """What is of interest in a built page."""

    path: Path
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._within: list[str] = []
        self.feed(self.path.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag == "link" and values.get("rel") not in _PAGES_LINKED:
            self.loaded.append(values["href"])
        if tag in _LOADING and _LOADING[tag] in values:
            self.loaded.append(values[_LOADING[tag]])
        if tag in ("script", "style", "code"):
            self._within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._within and self._within[-1] == tag:
            self._within.pop()

    def handle_data(self, data: str) -> None:
        if not self._within:
            self.text.append(data)


@pytest.mark.timeout(600)
def test_the_site_is_built_without_a_warning_and_complete(tmp_path: Path) -> None:
    """One test, as building the site takes as long as all others here."""
    site = tmp_path / "site"
    command = [sys.executable, "tools/build_site.py", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    assert_loads_nothing_from_anywhere_else(site, pages)
    assert_links_lead_somewhere_and_docstrings_are_rendered(site, pages)


def assert_loads_nothing_from_anywhere_else(site: Path, pages: dict[Path, Page]) -> None:
    for page in pages.values():
        for address in page.loaded:
            parts = urlsplit(address)
            assert parts.scheme == "data" or not (parts.scheme or parts.netloc), f"{page.path} loads {address}"
    assert pages[site / "index.html"].loaded.count("example.html") == 1  # the run on the start page
    for path in site.rglob("*.css"):
        outside = re.findall(r"""(?:@import|url\()\s*["']?(?:https?:)?//[^)"']*""", path.read_text())
        assert not outside, f"{path} loads {outside}"


def assert_links_lead_somewhere_and_docstrings_are_rendered(site: Path, pages: dict[Path, Page]) -> None:
    # Also where no page of ours was written by hand: references made of docstrings, and sources.
    for page in pages.values():
        raw = re.findall(r":(?:class|meth|func|attr|data|mod|exc):|^::: .*|``", "".join(page.text), re.MULTILINE)
        assert not raw, f"{page.path} shows {raw}"
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or page.path.name == "404.html":
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{page.path} leads to {link}"
            if parts.fragment and target in pages and not parts.fragment.startswith("__"):
                assert unquote(parts.fragment) in pages[target].anchors, f"{page.path} leads to {link}"
    links = pages[site / "reference/consumers/index.html"].links
    # From the docstrings of LoggerDestination.check and of Callback.every.
    assert "../errors/#offloop.bus.ConfigurationError" in links
    assert "../bus/#offloop.bus.BASE_EVENTS" in links
    own = pages[site / "attach/index.html"].links
    assert any(link.endswith("sources/bus/types/event.py/") for link in own)
    for target in re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text()):
        assert (site / target / "index.html").is_file(), target
    # Of the help that the build adds.
    assert "offloop-compare" in pages[site / "commands/index.html"].anchors
