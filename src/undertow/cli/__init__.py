"""The command line: `undertow train` and its neighbours."""

from undertow.cli.commands import main as main
