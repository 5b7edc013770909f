"""What the benchmark of the parameter server trains: a small network in eager PyTorch, and its peers' servers.

The peers are written again by their descriptions: one actor that holds all parameters, as Ray's own example of an
asynchronous parameter server does, and the same behind `torch.distributed.rpc`. Neither has copies or a bound of delay.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed.rpc as rpc

BATCH, WIDTH = 32, 256


def make_model(width: int = WIDTH) -> torch.nn.Module:
    """Two hidden layers."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 10))


def find_gradients(model: torch.nn.Module, number: int) -> float:
    """The gradients of a batch that follows from its number are left to the parameters."""
    draw = torch.Generator().manual_seed(number)
    x = torch.randn(BATCH, 64, generator=draw)
    target = x[:, :10].argmax(1)
    model.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), target)
    loss.backward()
    return float(loss.detach())


class EagerComputing:
    """What a worker of Undertow's server computes here."""

    def __init__(self, width: int = WIDTH, pause_s: float = 0.0) -> None:
        torch.set_num_threads(1)
        self.model, self.pause_s = make_model(width), pause_s

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters."""
        return dict(self.model.named_parameters())

    def prepare(self, take: Any) -> dict[str, Any]:
        """Nothing is planned."""
        self.take = take
        return {"peak_bytes": 0, "shared": {}}

    def compute(self, number: int) -> tuple[float, int]:
        """One batch; the pause stands for a larger model."""
        time.sleep(self.pause_s)
        loss = find_gradients(self.model, number)
        for name, parameter in reversed(self.parameters().items()):
            assert parameter.grad is not None
            self.take(name, parameter.grad)
        return loss, BATCH

    def buffers(self) -> dict[str, Any]:
        """None."""
        return {}


class PlainServer:
    """All parameters in one process: gradients in, parameters out."""

    def __init__(self, width: int) -> None:
        torch.set_num_threads(1)
        self.model = make_model(width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def apply(self, gradients: list[Any]) -> list[Any]:
        """One update."""
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = torch.from_numpy(gradient.copy())
        self.optimizer.step()
        return self.read()

    def read(self) -> list[Any]:
        """The parameters."""
        return [parameter.detach().numpy().copy() for parameter in self.model.parameters()]


class PlainWorker:
    """Takes parameters, pushes gradients, waits for the answer."""

    def __init__(self, server: Any, width: int) -> None:
        torch.set_num_threads(1)
        self.server, self.model = server, make_model(width)

    def run(self, first: int, num_batches: int) -> int:
        """So many batches."""
        import ray

        values = ray.get(self.server.read.remote())
        for number in range(first, first + num_batches):
            _load(self.model, values)
            find_gradients(self.model, number)
            gradients = [parameter.grad.numpy() for parameter in self.model.parameters()]
            values = ray.get(self.server.apply.remote(gradients))
        return num_batches


def _load(model: torch.nn.Module, values: list[Any]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(torch.from_numpy(value.copy()))


_rpc_server: PlainServer | None = None


def _rpc_apply(gradients: list[Any]) -> list[Any]:
    global _rpc_server
    _rpc_server = _rpc_server or PlainServer(WIDTH)
    return _rpc_server.apply(gradients) if gradients else _rpc_server.read()


def run_rpc(rank: int, port: int, num_workers: int, num_batches: int, seconds: Any) -> None:
    """A process of the job over torch.distributed.rpc: rank 0 is the server."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "TP_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=num_workers + 1)
    if rank:
        model = make_model()
        values = rpc.rpc_sync("rank0", _rpc_apply, args=([],))
        start = time.monotonic()
        for number in range(num_batches):
            _load(model, values)
            find_gradients(model, rank * 10**6 + number)
            gradients = [parameter.grad.numpy() for parameter in model.parameters()]
            values = rpc.rpc_sync("rank0", _rpc_apply, args=(gradients,))
        seconds[rank - 1] = time.monotonic() - start
    rpc.shutdown()
