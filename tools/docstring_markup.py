"""A griffe extension: what our docstrings have of reStructuredText becomes what a Markdown page can show.

- Docstrings name things with roles, as ``:class:`~offloop.bus.types.timestamp.Timestamp` ``. A role becomes a link to
  the page that documents the name, or plain code where no page does, because it is not public or belongs to another
  library. A role that names nothing of ours is reported, which fails a strict build.
- They introduce code with ``::``, which becomes ``:``.
- They describe arguments that belong together in one entry, ``start, end: ...``, which becomes an entry for each.

Roles: https://www.sphinx-doc.org/en/master/usage/domains/python.html#cross-referencing-python-objects
"""

import builtins
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from griffe import Alias, AliasResolutionError, Extension, GriffeLoader, Module, Object, get_logger

PACKAGE = "offloop"
"""Its names have to exist; what belongs to others is shown as it is written."""

_log = get_logger("docstring_markup")

_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod|exc|obj):`(?P<short>~?)(?P<target>[^`]+)`")
_LITERAL_BLOCK = re.compile(r"::[ \t]*$", re.MULTILINE)
_ARGUMENTS = re.compile(r"(?<=^Args:\n)(?:(?:[ \t].*)?\n?)*", re.MULTILINE)
_SHARED_ENTRY = re.compile(
    r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +\S.*)*)", re.MULTILINE
)


class DocstringMarkup(Extension):
    """Rewrites the docstrings of every package that is loaded."""

    def on_module_members(self, *, mod: Module, **kwargs: Any) -> None:
        """Has ``import *`` find the names that a package imports for types and loads when they are used."""
        for member in mod.members.values() if mod.is_init_module else ():
            if isinstance(member, Alias):
                member.runtime = True

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: Any) -> None:
        """Rewrites every docstring of the package, members of members included."""
        _rewrite(pkg, loader)


def _rewrite(obj: Object, loader: GriffeLoader) -> None:
    if obj.docstring is not None:
        text = _ROLE.sub(lambda match: _link(obj, match["target"], bool(match["short"]), loader), obj.docstring.value)
        text = _LITERAL_BLOCK.sub(":", text)
        obj.docstring.value = _ARGUMENTS.sub(lambda match: _SHARED_ENTRY.sub(_entry_for_each, match[0]), text)
    for member in obj.members.values():
        if not isinstance(member, Alias):
            _rewrite(member, loader)


def _entry_for_each(match: re.Match[str]) -> str:
    return "\n".join(f"{match['indent']}{name}: {match['text']}" for name in match["names"].split(", "))


def _link(obj: Object, target: str, is_short: bool, loader: GriffeLoader) -> str:
    shown = f"<code>{target.rpartition('.')[2] if is_short else target}</code>"
    for path in _candidates(obj, target):
        with suppress(KeyError, AliasResolutionError):
            found = loader.modules_collection[path].canonical_path
            return f'<autoref identifier="{found}" optional>{shown}</autoref>'
    first = target.partition(".")[0]
    if first == PACKAGE or (first == target and not hasattr(builtins, target)):
        _log.warning("%s: the docstring of %s names %s, which does not exist", obj.filepath, obj.path, target)
    return shown


def _candidates(obj: Object, target: str) -> Iterator[str]:
    """The full paths that ``target`` may mean: from the top, or as seen from where the docstring is."""
    first, _, rest = target.partition(".")
    if first == PACKAGE:
        yield target
    scope: Object | Alias | None = obj
    while scope is not None:
        if scope.is_class or scope.is_module:
            with suppress(KeyError, AliasResolutionError):
                found = scope.all_members[first].canonical_path
                yield f"{found}.{rest}" if rest else found
        scope = scope.parent
