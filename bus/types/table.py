"""Columns that every table of a run has."""

FIXED = ("step", "time", "rank", "attempt")
"""The step of a row, its time in seconds since 1970, and the process that added it. Own columns of these names get a
``_`` behind."""
