"""Runs callbacks that were written for Composer.

Begin with ``adapter``."""
