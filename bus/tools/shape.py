"""What kinds of values a column has held: from one pass over a recording, before its rows are written with types."""

import math
from typing import TYPE_CHECKING, Any

from offloop.bus.strict_json import json_text

if TYPE_CHECKING:
    import pyarrow as pa


_LONG = 1 << 63
_EXACT_IN_A_FLOAT = 1 << 53

_KINDS: dict[type, str] = {
    type(None): "nothing",
    bool: "bool",
    int: "int",
    float: "float",
    str: "text",
    bytes: "bytes",
    list: "list",
    dict: "map",
}


class Shape:
    """What the values seen so far have in common."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        self.finite = True
        """Whether every number is one that JSON has."""
        self.smallest = self.largest = 0
        self.items: Shape | None = None
        """Of the elements of lists."""
        self.members: dict[str, Shape] = {}
        """Of what is in maps, by name."""

    def see(self, value: Any) -> None:
        """Takes in one more value."""
        kind = _KINDS.get(type(value), "other")
        self.kinds.add(kind)
        if kind == "int":
            if value < self.smallest:
                self.smallest = value
            elif value > self.largest:
                self.largest = value
        elif kind == "float":
            self.finite = self.finite and math.isfinite(value)
        elif kind == "list":
            if self.items is None:
                self.items = Shape()
            for item in value:
                self.items.see(item)
        elif kind == "map":
            self.see_members(value)

    def see_members(self, values: "dict[Any, Any]") -> None:
        """Takes in the values of one more map."""
        members = self.members
        for name, value in values.items():
            if name not in members:
                members[name] = Shape()
            members[name].see(value)

    # -- as columns of Arrow ------------------------------------------------------------------------------------------

    def arrow_type(self) -> "pa.DataType":
        """The type of a column that holds all of the values as they are; text where there is none."""
        import pyarrow as pa

        return self._arrow_type() or pa.string()

    def _arrow_type(self) -> "pa.DataType | None":
        import pyarrow as pa

        kinds = self.kinds - {"nothing"}
        if not kinds:
            return pa.null()
        if kinds == {"int"}:
            if self.smallest >= -_LONG and self.largest < _LONG:
                return pa.int64()
            return pa.uint64() if self.smallest == 0 else None
        if kinds == {"float"} or (kinds == {"int", "float"} and self._is_exact):
            return pa.float64()
        if kinds == {"list"}:
            items = self.items._arrow_type() if self.items else None
            return None if items is None else pa.list_(items)
        plain = {"bool": pa.bool_(), "text": pa.string(), "bytes": pa.binary()}
        return plain.get(kinds.pop()) if len(kinds) == 1 else None

    @property
    def _is_exact(self) -> bool:
        return self.smallest >= -_EXACT_IN_A_FLOAT and self.largest <= _EXACT_IN_A_FLOAT

    # -- as JSON Schema -----------------------------------------------------------------------------------------------

    def json_schema(self) -> dict[str, Any] | None:
        """What :func:`offloop.bus.strict_json.plain` makes of the values; ``None`` when they have no one type in it.
        Only what every viewer understands is used: a member of no type of its own is not mentioned."""
        if len(self.kinds) != 1 and self.kinds != {"int", "float"}:
            return None
        if "float" in self.kinds:
            return {"type": "number"} if self.finite else None
        (kind,) = self.kinds
        if kind == "bytes":
            return {"type": "string", "contentEncoding": "base64"}
        if kind == "list":
            items = self.items.json_schema() if self.items else None
            return None if items is None or items["type"] == "array" else {"type": "array", "items": items}
        if kind == "map":
            properties = {name: member.json_schema() for name, member in self.members.items()}
            return {
                "type": "object",
                "properties": {str(name): one for name, one in properties.items() if one is not None},
            }
        name = {"bool": "boolean", "int": "integer", "text": "string"}.get(kind)
        return None if name is None else {"type": name}


def as_text(value: Any) -> str | None:
    """A value in a column of texts that holds other things too."""
    return value if value is None or isinstance(value, str) else json_text(value)
