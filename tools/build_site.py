"""Builds the site with Zensical: ``python tools/build_site.py [FOLDER]``, by default into ``site/``.

It uses a copy of ``docs/`` with additions:

- The start page shows ``docs/example.html`` in a frame, which GitHub does not allow.
- The page of commands shows the ``--help`` of each.
- ``llms.txt`` links to the pages of the site.
- A link such as ``../examples/plain_loop.py`` works in the repository. Every linked file outside of ``docs/`` becomes a
  page that shows it."""

import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from offloop.bus.cli.main import bus

_ROOT = Path(__file__).resolve().parents[1]
_WIDTH = 80  # in characters: fits on the site, whatever the terminal of the build
_LINK = re.compile(r"\]\((?P<target>\.\./[^)#\s]+)(?:#[^)]*)?\)")
_LANGUAGES = {".js": "javascript", ".py": "python", ".sh": "sh", ".toml": "toml", ".yml": "yaml", ".yaml": "yaml"}


def build(folder: Path) -> int:
    """Build the site, replacing the folder; returns the exit code of Zensical, 0 without any warning."""
    with tempfile.TemporaryDirectory() as scratch:
        # Zensical reads and writes only below its configuration.
        project = Path(scratch)
        configuration = (_ROOT / "mkdocs.yml").read_text()
        (project / "mkdocs.yml").write_text(configuration.replace("paths: [.]", f"paths: [{_ROOT}]"))
        (project / "tools").symlink_to(_ROOT / "tools")
        shutil.copytree(_ROOT / "docs", project / "docs")
        _add_example(project / "docs")
        _add_commands(project / "docs" / "commands.md")
        _add_sources(project / "docs")
        llms = project / "docs" / "llms.txt"
        llms.write_text(re.sub(r"\]\((?:index|(\w+))\.md\)", r"](\1/)", llms.read_text()).replace("](/)", "](./)"))
        zensical = [sys.executable, "-m", "zensical", "build", "--strict"]
        code = subprocess.run(zensical, cwd=project, check=False).returncode
        if code == 0:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.move(project / "site", folder)
    return code


def _add_example(docs: Path) -> None:
    start = docs / "index.md"
    frame = '<iframe class="example" src="example.html" title="A run as one HTML file" loading="lazy"></iframe>'
    start.write_text(start.read_text().replace("<!-- example -->", f"{frame}\n\n[Open it on its own](example.html)"))


def commands() -> list[str]:
    return [context.command_path for context in _contexts()]


def _add_commands(page: Path) -> None:
    sections = (f"\n## {context.command_path}\n\n```text\n{context.get_help()}\n```\n" for context in _contexts())
    page.write_text(page.read_text() + "".join(sections))


def _contexts(
    command: click.Command = bus, name: str | None = bus.name, parent: click.Context | None = None
) -> Iterator[click.Context]:
    settings = {**command.context_settings, "terminal_width": _WIDTH, "max_content_width": _WIDTH}
    context = click.Context(command, parent=parent, info_name=name, **settings)
    yield context
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None:
                yield from _contexts(found, child, context)


def _add_sources(docs: Path) -> None:
    """Make a page of each linked source, and change the links to it."""
    linked = set()
    for page in docs.rglob("*.md"):
        here = page.relative_to(docs).parent.as_posix()

        def lead(match: re.Match[str], here: str = here) -> str:
            source = posixpath.normpath(posixpath.join("docs", here, match["target"]))
            if source.startswith(("..", "docs/")) or not (_ROOT / source).is_file():
                return match[0]
            linked.add(source)
            return f"]({posixpath.relpath(f'sources/{source}.md', here)})"

        page.write_text(_LINK.sub(lead, page.read_text()))
    for source in linked:
        shown = docs / "sources" / f"{source}.md"
        shown.parent.mkdir(parents=True, exist_ok=True)
        language = _LANGUAGES.get(shown.with_suffix("").suffix, "text")
        # More backticks than any source has in a row.
        text = f"``````{language}\n{(_ROOT / source).read_text()}\n``````\n"
        shown.write_text(f"---\nsearch:\n  exclude: true\n---\n# {source}\n\n{text}")


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1] if len(sys.argv) > 1 else _ROOT / "site")))
