"""`python -m midstream` is the command line."""

from midstream.cli import main

main()
