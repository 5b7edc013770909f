"""The command line: `undertow train` and the other commands."""

from undertow.cli.commands import main as main
