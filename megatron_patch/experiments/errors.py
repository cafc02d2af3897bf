"""What can stand against an experiment; all of it is the user's to mend."""

from __future__ import annotations


class ExperimentError(ValueError):
    """An experiment that cannot go on as asked; the text names what differs and the remedy."""

    exit_code = 2
