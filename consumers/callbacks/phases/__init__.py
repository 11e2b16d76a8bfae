"""Says where the time of a batch goes, and which rank holds up the others.

Begin with ``phases``.
"""
