"""What a host says of its ranks: makes a window of about a second's batches, for runs on several hosts.

Begin with ``windows``; ``watch`` runs it beside a broker."""
