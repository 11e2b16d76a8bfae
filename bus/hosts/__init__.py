"""Windows of a host's ranks, about one a second, for runs on several hosts. ``watch`` writes them beside a broker."""
