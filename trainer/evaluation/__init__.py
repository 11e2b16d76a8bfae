"""Evaluation, prediction, and the metrics of evaluators. Begin with ``evaluation``."""
