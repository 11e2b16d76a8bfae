"""The command ``trainer``.

May import everything in ``trainer``. Begin with ``main``.
"""
