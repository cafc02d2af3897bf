"""`AttentionMonitor` in other programs' loops, one file a program."""
