"""Runs callbacks that were written for Composer; begin with ``adapter``."""
