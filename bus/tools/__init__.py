"""Export, convert, diff and import of recordings."""
