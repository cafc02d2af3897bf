"""One HTML page about a run, and curves of several runs in one PNG."""
