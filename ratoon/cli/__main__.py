# Owns: `python -m ratoon.cli`.
# Promises: the same as the `ratoon` command.
# Never: holds a command.
"""The command line as a module."""

from ratoon.cli import main

main()
