"""One run directory -> one self-contained HTML page."""
