"""Evaluation, prediction, and the metrics of evaluators.

May import: engine, distributed, data. Begin with ``evaluation``.
"""
