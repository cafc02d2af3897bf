"""Entry of ``megatron-patch`` and ``python -m megatron_patch``.

Written for Python 3.6 and up, so that an old one gets a sentence instead of a syntax error.
"""

import os
import sys


def shadowed():
    """What to say when ``megatron_patch`` is another project's package, else None."""
    try:
        import megatron_patch
    except ImportError as error:
        return f"megatron_patch cannot be imported: {error}"
    here = os.path.dirname(os.path.realpath(__file__))
    found = getattr(megatron_patch, "__file__", None) or "a folder without __init__.py"
    if os.path.dirname(os.path.realpath(found)) == here:
        return None
    return (
        f"the import name megatron_patch belongs to another package here: {found} (this program "
        f"is in {here}). Pai-Megatron-Patch uses the same name: take it out of PYTHONPATH, or use "
        "another environment."
    )


def open_streams():
    """Open what whoever started this process has closed of its standard streams.

    A file opened later would take the number, and get what libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number is free
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def main(argv=None):
    """Run the command line; returns the exit code."""
    open_streams()
    problem = shadowed()
    if problem is not None:
        sys.stderr.write(problem + "\n")
        return 2
    from megatron_patch import python_complaint

    problem = python_complaint()
    if problem is not None:
        sys.stderr.write(problem + "\n")
        return 2
    try:
        from megatron_patch.cli.app import run

        return run(argv)
    except KeyboardInterrupt:  # while the commands were imported
        sys.stderr.write("megatron-patch: interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
