"""The commands about Undertow itself: version, models, doctor, and the option --version."""

from __future__ import annotations

import sys
from importlib.metadata import version as version_of
from typing import Annotated

import typer

import undertow
from undertow.cli.exits import DONE
from undertow.cli.printing import print_data, print_result
from undertow.errors import CallError
from undertow.free_memory import find_free_memory

# What a process has after importing all that `undertow plan` needs, less what it has before; measured without files,
# which the system may drop, with the build of PyTorch 2.13 for CPUs. Builds for GPUs take more.
LIBRARIES_BYTES = 224 << 20

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def add_about_commands(app: typer.Typer) -> None:
    """Add these commands to the command line."""
    app.callback()(about)
    app.command("models")(models_command)
    app.command("doctor")(doctor_command)
    app.command("version")(version_command)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"undertow {undertow.__version__}")
        raise typer.Exit(DONE)


def _check_room() -> None:
    """Raise CallError where libraries alone take more than is free: the system would end the command without a word."""
    free = find_free_memory()
    if free.free_bytes < LIBRARIES_BYTES:
        raise CallError(
            f"PyTorch and the other libraries take {LIBRARIES_BYTES >> 20} MiB, and {free.free_bytes >> 20} MiB of "
            f"{free.limit_bytes >> 20} MiB are free in {free.where}; give it more"
        )


def about(
    is_version_wanted: Annotated[
        bool, typer.Option("--version", help="Show Undertow's version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Training with an explicit backward pass."""
    _check_room()


def models_command(is_json: JsonOption = False) -> int:
    """List the models of the zoo, with their sizes and an example input."""
    from undertow.cli.zoo_list import list_zoo

    found = list_zoo()
    print_data([item.to_dict() for item in found.models]) if is_json else print(found)
    return DONE


def doctor_command(is_json: JsonOption = False) -> int:
    """Show versions, processor, threads, allocator, cache, and what is fast on this machine."""
    from undertow.cli.doctor import examine

    print_result(examine(), is_json)
    return DONE


def version_command(is_json: JsonOption = False) -> int:
    """Show the versions of Undertow, PyTorch and Python."""
    versions = {
        "undertow": undertow.__version__,
        "torch": version_of("torch"),
        "python": sys.version.split()[0],
    }
    print_data(versions) if is_json else print(*(f"{name} {number}" for name, number in versions.items()), sep="\n")
    return DONE
