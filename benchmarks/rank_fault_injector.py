"""The model of `rank_faults.py`, which breaks one rank of the job that trains it. Not a benchmark by itself.

In: the variable FAULT, with a kind, a phase, a rank and the file of the log. `make()` returns a network, and puts the
fault into the phase by replacing functions of Undertow in this process. It fires once: the log shows that it has.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import time

import torch
from torch import nn

FAULT = json.loads(os.environ.get("FAULT", "null"))
IS_ARMED = FAULT is not None and os.environ.get("RANK") == str(FAULT["rank"]) and not os.path.exists(FAULT["log"])
STEP = 10  # counted from 0; checkpoints are after 4 and 8
CLONE_NEWNS = 0x20000  # of unshare, in linux/sched.h
state = {"step": -1, "saves": 0}


def fire() -> None:
    """Write the log, durably, then break."""
    if not IS_ARMED or os.path.exists(FAULT["log"]):
        return
    with open(FAULT["log"], "x") as file:
        file.write(str(time.time()))
        file.flush()
        os.fsync(file.fileno())
    kind = FAULT["kind"]
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "exit":
        os._exit(9)
    elif kind == "hang":
        time.sleep(100_000)
    elif kind == "raise":
        raise RuntimeError("injected")
    elif kind == "link":
        shut_connections()
    elif kind == "down":  # in a network namespace of this rank's own
        subprocess.run(["ip", "link", "set", FAULT["interface"], "down"], check=True)
    elif kind == "disk":
        fill_disk()


def shut_connections() -> None:
    """Shut down every connection but those to the store: what a link that is down comes to."""
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # not a socket
            continue
        try:
            if connection.getpeername()[1] != int(os.environ["MASTER_PORT"]):
                connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError, TypeError):  # it listens, or is of another family
            pass
        connection.close()


def fill_disk() -> None:
    """In this rank alone, the run's folder is on a disk of one page from now on. Needs root."""
    library = ctypes.CDLL(None, use_errno=True)
    folder = FAULT["log"].removesuffix(".fired").encode()
    private = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC: nothing of this is seen outside
    for failed in (
        library.unshare(CLONE_NEWNS),
        library.mount(None, b"/", None, private, None),
        library.mount(b"none", folder, b"tmpfs", 0, b"size=4k"),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Fuse(torch.autograd.Function):
    """Passes its input on; breaks in the forward or the backward pass."""

    @staticmethod
    def forward(ctx, x):
        if state["step"] == STEP and FAULT["phase"] == "forward":
            fire()
        return x * 2

    @staticmethod
    def backward(ctx, ct):
        if state["step"] == STEP and FAULT["phase"] == "backward":
            fire()
        return ct * 2


class Network(nn.Module):
    """What the step has to get right: batch normalisation and dropout."""

    def __init__(self):
        super().__init__()
        self.before = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3))
        self.after = nn.Linear(64, 4)

    def forward(self, x):
        return self.after(Fuse.apply(self.before(x)))


def make() -> Network:
    """The network; the fault is in its phase from now on."""
    if IS_ARMED:
        arm()
    return Network()


def arm() -> None:
    """Put the fault into its phase."""
    from undertow.api.sharding import ShardedStep
    from undertow.ops import communication
    from undertow.ranks.ranks import Ranks
    from undertow.train import weights

    call, reduce, finish, write = ShardedStep.__call__, communication.reduce, Ranks.finish, weights.write_durably
    phase = FAULT["phase"]

    def counted_call(self, *args, **kwargs):
        state["step"] = self.shards.num_calls
        try:
            return call(self, *args, **kwargs)
        finally:
            state["step"] = -1

    def breaking_reduce(*args):
        steps = reduce(*args)
        yield next(steps)
        if state["step"] == STEP:  # in the lane's thread, between sending the parts and sending the sum
            fire()
        yield from steps

    def breaking_finish(self, transfer):
        finish(self, transfer)
        if state["step"] == STEP and transfer.about.startswith("the sum"):
            fire()  # what comes next is the update of these parameters

    def breaking_write(path, content):
        def write_and_break(file):
            content(file)
            fire()

        state["saves"] += 1
        if FAULT["kind"] == "disk" and state["saves"] == 3:
            fire()
        write(path, write_and_break if state["saves"] == 3 and FAULT["kind"] != "disk" else content)

    if phase == "load":
        fire()
    ShardedStep.__call__ = counted_call
    if phase == "reduce":
        communication.reduce = breaking_reduce
    elif phase == "update":
        Ranks.finish = breaking_finish
    elif phase == "save":
        weights.write_durably = breaking_write
