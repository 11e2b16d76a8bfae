"""Delivery from the logger to destinations: ``fanout``, then the ``spool`` on disk."""
