"""Passes streams through callbacks: begin with ``runner``, then ``dispatcher``."""
