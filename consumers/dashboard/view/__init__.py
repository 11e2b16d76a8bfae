"""The model of a run that both dashboards draw, and of the table of all runs. Begin with ``run_view``."""
