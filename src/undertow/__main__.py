"""`python -m undertow` is the `undertow` command."""

from undertow.cli import main

main()
