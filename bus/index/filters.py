"""Filters of runs, such as ``lr > 0.01 and status == finished``: Python expressions with unquoted names and values."""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from offloop.bus.errors import ConfigurationError
from offloop.bus.index.columns import Columns, ValueOf
from offloop.bus.index.entry import RunEntry

Predicate: TypeAlias = Callable[[RunEntry], bool]

_DEEPEST = 50
_OPERAND = re.compile(r"""`[^`]+`|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s()=!<>~"'`]+""")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?", re.IGNORECASE)
_WORDS = ("and", "or", "not")
_SIGNS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ALLOWED = "use comparisons (== != < <= > >= ~), and, or, not and parentheses, as in 'lr > 0.01 and status == finished'"


def parse_filter(text: str, columns: Columns) -> Predicate:
    """Parse an expression over columns, see :class:`offloop.bus.index.columns.Columns`.

    A comparison has a name at the left and a number or text at the right; ``~`` means contains. A name alone is true
    for values other than zero, false and empty. Texts with blanks or operators need quotation marks, such names
    backticks. ``tags == baseline`` is true for runs with that tag. A comparison is false for runs without the value, or
    with one of another kind.

    Raises ConfigurationError for another expression, and for a name that no run has."""
    return _Filter(text, columns).predicate


class _Filter:
    def __init__(self, text: str, columns: Columns) -> None:
        self._text, self._columns = text.strip(), columns
        # Python parses the structure only: placeholders of the same length replace names, values and operators.
        structure = re.sub(r"\s", " ", _OPERAND.sub(_blank, self._text))
        structure = re.sub(r"(?<![=!<>])=(?!=)|~", "<", structure)
        try:
            self.predicate = self._predicate(ast.parse(structure, mode="eval").body)
        except SyntaxError as error:
            raise self._error(error.offset - 1 if error.offset else len(self._text)) from None
        except (RecursionError, MemoryError):
            raise self._error(0) from None

    def _predicate(self, node: ast.expr, depth: int = 0) -> Predicate:
        match node:
            case ast.BoolOp() if depth < _DEEPEST:
                tests = [self._predicate(value, depth + 1) for value in node.values]
                joined = all if isinstance(node.op, ast.And) else any
                return lambda entry: joined(test(entry) for test in tests)
            case ast.UnaryOp(op=ast.Not()) if depth < _DEEPEST:
                negated = self._predicate(node.operand, depth + 1)
                return lambda entry: not negated(entry)
            case ast.Compare(left=ast.Name() as left, comparators=[(ast.Name() | ast.Constant()) as right]):
                [sign] = re.findall("[=!<>~]+", self._text[left.end_col_offset : right.col_offset])
                return _comparison(self._value_of(left), sign, self._written(right))
            case ast.Name():
                value_of = self._value_of(node)
                return lambda entry: bool(sortable(value_of(entry)))
            case ast.BinOp():  # such as >>
                raise self._error(len(self._text) - len(self._text[node.left.end_col_offset :].lstrip()))
        raise self._error(node.col_offset)

    def _written(self, node: ast.expr) -> str:
        return self._text[node.col_offset : node.end_col_offset]

    def _value_of(self, node: ast.Name) -> ValueOf:
        return self._columns.find(self._written(node).strip("`")).value

    def _error(self, place: int) -> ConfigurationError:
        found = repr(self._text[place : place + 20]) if self._text[place:] else "end"
        return ConfigurationError(
            f"{self._text!r} is not a filter: unexpected {found} at character {place + 1}; {_ALLOWED}"
        )


def _blank(operand: re.Match[str]) -> str:
    text = operand[0]
    if text.lower() in _WORDS:
        return text.lower()
    return text[0] + "_" * (len(text) - 2) + text[0] if text[0] in "\"'" else "_" * len(text)


def _comparison(value_of: ValueOf, sign: str, operand: str) -> Predicate:
    is_quoted = operand[0] in "\"'"
    text = re.sub(r"\\(.)", r"\1", operand[1:-1]) if is_quoted else operand.strip("`")
    constant: str | float = text
    if not is_quoted and sign != "~" and _NUMBER.fullmatch(text):
        constant = int(text) if text.lstrip("+-").isdigit() else float(text)
    usual = None if sign == "~" else type(constant)
    compare: Callable[[Any, Any], bool] = _SIGNS.get(sign, operator.eq)

    def holds_of_one(value: Any) -> bool:
        if sign == "~":
            return text.lower() in str(value).lower()
        if isinstance(value, bool):
            return compare(str(value).lower(), text.lower())
        if isinstance(value, int | float) and not isinstance(constant, str):
            return compare(value, constant)
        # A text that looks like a number was entered as one.
        is_ordered = isinstance(value, str) and isinstance(constant, str)
        return (is_ordered or compare in (operator.eq, operator.ne)) and compare(str(value), text)

    def holds(entry: RunEntry) -> bool:
        value = value_of(entry)
        # Fast path: most values have the type of the constant.
        if type(value) is usual:
            return compare(value, constant)
        if isinstance(value, tuple):
            return text not in value if sign == "!=" else any(map(holds_of_one, value))
        return value is not None and holds_of_one(value)

    return holds


def sortable(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or None
    return value
