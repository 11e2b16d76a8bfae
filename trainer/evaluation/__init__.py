"""Evaluation, prediction, and the metrics of evaluators.

May import: arguments, data, device, distributed, engine. Begin with ``evaluation``.
"""
