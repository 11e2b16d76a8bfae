"""Names and files of checkpoints, for trainer and consumers; needs no torch."""
