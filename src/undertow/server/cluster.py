"""Ray, imported late: a cluster on this machine, or one that runs already.

On this machine everything listens on 127.0.0.1. Ray's token guards it: whoever holds the token can run code on the
cluster. A token is made for a cluster that is started here, in a file that only this user can read. Ray's processes get
the path of that file, so the token stands in no argument list and in no log.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from undertow.errors import CallError

INSTALL = "--parallel server needs Ray, which is not installed: pip install 'undertow[cluster]'"
CONNECT_S = 10.0
MIN_STORE_BYTES = 128 << 20
TOKEN_NAMES = ("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")


def import_ray(is_local: bool) -> Any:
    """Ray itself; raises CallError with how to install it. Ray reads its settings when it is imported."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if is_local:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # despite its name: else it takes the machine's address
        if not any(name in os.environ for name in TOKEN_NAMES):
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(_make_token())
    try:
        import ray
    except ImportError:
        raise CallError(INSTALL) from None
    return ray


def _make_token() -> Path:
    """A file with a new token, until this process ends; Ray keeps what it has read."""
    folder = Path(tempfile.mkdtemp(prefix="undertow-"))  # which only this user can enter
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "token"
    path.write_text(secrets.token_hex(32))
    return path


def _check_reachable(address: str) -> None:
    """Raise CallError unless somebody listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise CallError(f"a Ray cluster is written as host:port, got {address!r}")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise CallError(f"the Ray cluster at {address} cannot be reached: {error}") from None


@contextmanager
def running_cluster(address: str | None, num_bytes: int, num_cpus: int | None = None) -> Iterator[Any]:
    """Ray, connected to a cluster at `host:port`, or to one of this machine that ends with the block.

    `num_bytes` is what is on its way between processes at a time, at most.
    """
    ray = import_ray(address is None)
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    if address is None:
        options |= {
            "_node_ip_address": "127.0.0.1",
            "object_store_memory": max(MIN_STORE_BYTES, num_bytes),
            "num_cpus": num_cpus,
            "include_dashboard": False,
        }
    else:
        _check_reachable(address)
        options["address"] = address
    try:
        ray.init(**options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        where = "on this machine" if address is None else f"at {address}"
        raise CallError(
            f"the Ray cluster {where} cannot be used: {' '.join(str(error).split())[:300]}. It must be reachable, of "
            f"version {ray.__version__}, and have the token of {' or '.join(TOKEN_NAMES)}"
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()
