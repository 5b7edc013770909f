"""Two network namespaces joined by one link, which may have a limited rate. Not a benchmark by itself.

In: the rate in bytes per second, or none. Out: the words that start a process at either end, the address of the first
end, and what the interfaces have sent. The link is a pair of veth; its rate is a token bucket at both ends. Everything
is removed at the end. It needs root, `ip` and `tc`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass, field
from types import TracebackType

# Packets of this size have headers of less than 1 %; a capped link takes packets apart to their real size.
PACKET_BYTES = 9000
BURST_BYTES = 1 << 20  # less, and a processor with other work to do does not come to refill it in time
QUEUE_MS = 100


def why_not() -> str | None:
    """Why such links cannot be made here; None if they can."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool}; install iproute2"
    if os.geteuid() != 0:
        return "only root makes network namespaces"
    name = f"undertow-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    _call("ip", "netns", "del", name)
    return None


@dataclass
class JoinedEnds:
    """Two ends and the link between them, inside a `with`."""

    bytes_per_s: float | None = None
    names: tuple[str, str] = field(default_factory=lambda: (f"undertow-{os.getpid()}-0", f"undertow-{os.getpid()}-1"))
    interface = "wire"
    addresses = ("10.213.0.1", "10.213.0.2")  # of a private net that only these two see

    def __enter__(self) -> JoinedEnds:
        for name in self.names:
            _call("ip", "netns", "add", name)
        try:
            first, second = self.names
            other = ("peer", "name", self.interface, "netns", second)
            _call("ip", "-n", first, "link", "add", "name", self.interface, "type", "veth", *other)
            for name, address in zip(self.names, self.addresses, strict=True):
                _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", self.interface)
                _call("ip", "-n", name, "link", "set", self.interface, "mtu", str(PACKET_BYTES), "up")
                _call("ip", "-n", name, "link", "set", "lo", "up")
            if self.bytes_per_s is not None:
                self.limit(self.bytes_per_s)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._remove()

    def limit(self, bytes_per_s: float) -> None:
        """From now on each end sends so much at most."""
        self.bytes_per_s = bytes_per_s
        rate = ("rate", f"{8 * bytes_per_s:.0f}bit", "burst", str(BURST_BYTES), "latency", f"{QUEUE_MS}ms")
        for name in self.names:
            _call("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", self.interface, "root", "tbf", *rate)

    def set_down(self, place: int) -> None:
        """The interface of one end is down from now on."""
        _call("ip", "-n", self.names[place], "link", "set", self.interface, "down")

    def enter(self, place: int) -> list[str]:
        """The words before a command that runs at one end."""
        return ["ip", "netns", "exec", self.names[place]]

    def sent_bytes(self, place: int) -> int:
        """What the interface of one end has sent, by its own counter."""
        path = f"/sys/class/net/{self.interface}/statistics/tx_bytes"
        return int(_call(*self.enter(place), "cat", path))

    def _remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _call(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
