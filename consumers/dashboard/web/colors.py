"""The colours of runs."""

NAMED = 8
"""Up to so many runs have a colour each that was chosen by hand: ``--run-0`` and so on in ``page.css``."""

_HUES = 17
_DASHES = 3
_APART = 7
"""Neighbours in a list are far from one another."""
_FIRST = 212


def look_of(number: int, count: int) -> tuple[str, int]:
    """The colour of a run or group among so many, for the styles of a page, and its kind of line: 0 is a solid one. Of
    more than eight, each has a hue, and a kind of line where these are not enough."""
    if count <= NAMED:
        return f"var(--run-{number % NAMED})", 0
    hue = round(_FIRST + number * _APART % _HUES * 360 / _HUES) % 360
    return f"hsl({hue} var(--run-tone))", number // _HUES % _DASHES
