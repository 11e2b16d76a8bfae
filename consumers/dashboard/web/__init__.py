"""The dashboard in a browser.

May import: view, runner. Begin with ``page`` for what is drawn and ``server`` for who may see it.
"""
