"""The colours of runs, as ``page_colors.js`` has them for what it draws."""

NAMED = 8
"""Up to so many runs have a colour each that was chosen by hand: ``--run-0`` and so on in ``page.css``."""

_HUES = 17
_DASHES = 3
_APART = 7
_FIRST = 212


def swatch(number: int, count: int) -> str:
    """The colour of a run among so many, for the styles of a page. Of more than eight, each has a hue."""
    if count <= NAMED:
        return f"var(--run-{number % NAMED})"
    hue = round(_FIRST + number * _APART % _HUES * 360 / _HUES) % 360
    return f"hsl({hue} var(--run-tone))"


def dash(number: int, count: int) -> int:
    """Which kind of line a run has among so many, where hues are not enough: 0 is a solid one."""
    return 0 if count <= NAMED else number // _HUES % _DASHES
