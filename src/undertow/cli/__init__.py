"""The command line: `undertow inspect`, `undertow check`, `undertow version`."""

from undertow.cli.commands import main as main
