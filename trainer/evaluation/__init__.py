"""Evaluation, prediction, and the metrics of evaluators. Start with ``evaluation``."""
