"""A hook of mkdocs: pages of the site for the sources and examples that the documentation links to.

A page says ``[examples/plain_loop.py](../examples/plain_loop.py)``, which works where the repository is browsed. The
site has only what is in ``docs/``, so every file outside that is linked to becomes a page that shows it.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

_LINK = re.compile(r"\]\((?P<target>\.\./[^)#\s]+)(?:#[^)]*)?\)")
_LANGUAGES = {".js": "javascript", ".py": "python", ".sh": "sh", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each source that any page links to."""
    root = Path(config.docs_dir).parent
    pages = [file for file in files.documentation_pages() if file.abs_src_path is not None]
    linked = {source for page in pages for source in _sources(page.src_uri, page.content_string, root)}
    for source in sorted(linked):
        page = File.generated(config, _page_of(source), content=_shown(source, (root / source).read_text("utf-8")))
        page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Lets the links to sources lead to their pages."""
    root = Path(config.docs_dir).parent
    here = page.file.src_uri

    def lead(match: re.Match[str]) -> str:
        source = _source(here, match["target"], root)
        if source is None:
            return match[0]
        return f"]({posixpath.relpath(_page_of(source), posixpath.dirname(here) or '.')})"

    return _LINK.sub(lead, markdown)


def _sources(page: str, markdown: str, root: Path) -> set[str]:
    found = {_source(page, match["target"], root) for match in _LINK.finditer(markdown)}
    return {source for source in found if source is not None}


def _source(page: str, target: str, root: Path) -> str | None:
    """The file outside ``docs/`` that a page's link means, from the root of the repository; ``None`` if it is none."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return path if not path.startswith(("..", "docs/")) and (root / path).is_file() else None


def _page_of(source: str) -> str:
    return f"sources/{source}.md"


def _shown(source: str, text: str) -> str:
    language = _LANGUAGES.get(posixpath.splitext(source)[1], "text")
    # More backticks than any source has in a row.
    return f"---\nsearch:\n  exclude: true\n---\n# {source}\n\n``````{language}\n{text}\n``````\n"
