"""A griffe extension that converts reStructuredText in our docstrings to Markdown.

- A role, as in ``:class:`~offloop.bus.types.timestamp.Timestamp` ``, becomes a link to the page that documents the
name,
  or plain code if no page does, because it is internal or belongs to another library. A role with an unknown name of
  ours is reported, which fails a strict build.
- ``::`` before code becomes ``:``.
- One entry for several arguments, ``start, end: ...``, becomes an entry for each.

Roles: https://www.sphinx-doc.org/en/master/usage/domains/python.html#cross-referencing-python-objects"""

import builtins
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from griffe import Alias, AliasResolutionError, Extension, GriffeLoader, Module, Object, get_logger

PACKAGE = "offloop"  # its names must exist; names of other packages are shown as they are

_log = get_logger("docstring_markup")

_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod|exc|obj):`(?P<short>~?)(?P<target>[^`]+)`")
_LITERAL_BLOCK = re.compile(r"::[ \t]*$", re.MULTILINE)
_ARGUMENTS = re.compile(r"(?<=^Args:\n)(?:(?:[ \t].*)?\n?)*", re.MULTILINE)
_SHARED_ENTRY = re.compile(
    r"^(?P<indent> +)(?P<names>\w+(?:, \w+)+): (?P<text>.*(?:\n(?P=indent) +\S.*)*)", re.MULTILINE
)


class DocstringMarkup(Extension):
    """Rewrites the docstrings of every loaded package."""

    def on_module_members(self, *, mod: Module, **kwargs: Any) -> None:
        # Lets ``import *`` find names that are imported for types and loaded lazily.
        for member in mod.members.values() if mod.is_init_module else ():
            if isinstance(member, Alias):
                member.runtime = True

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: Any) -> None:
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
    """Yield the full paths that ``target`` may mean: absolute, or relative to the docstring."""
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
