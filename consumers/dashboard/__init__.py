"""Dashboards: what people watch while a run goes on, in a browser or in a terminal."""
