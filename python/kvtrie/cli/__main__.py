"""Runs the command line as ``python -m kvtrie.cli``."""

from kvtrie.cli import main

main()
