"""What every process of a parameter server's job is told when it begins: names, rules, parts. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from undertow.errors import CallError
from undertow.server.messages import Join, Leave, Push, Request
from undertow.server.parts import Part
from undertow.server.rules import Rules
from undertow.server.tensors import OptimizerSettings

BF16, F32 = "bf16", "f32"


@dataclass(frozen=True)
class JobDescription:
    """One job. `namespace` tells its actors from those of others on the same cluster."""

    namespace: str
    rules: Rules
    parts: tuple[Part, ...]
    optimizer: OptimizerSettings
    push_dtype: str = F32

    def check_request(self, part: Any, request: Any, gradient: Any) -> tuple[int, Request]:
        """Raise CallError unless this is a request that a server may act on. Who sends it is not trusted."""
        if type(part) is not int or not 0 <= part < len(self.parts):
            raise CallError(f"a request is about part {part!r}, and there are {len(self.parts)}")
        if isinstance(request, Join | Leave):
            if not isinstance(request.worker, str) or gradient is not None:
                raise CallError(f"part {part}: a worker that comes or goes is named by a word, and pushes nothing")
            return part, request
        if not isinstance(request, Push):
            raise CallError(f"part {part}: {type(request).__name__} is no request of a worker")
        numbers = (request.number, *request.versions)
        is_plain = isinstance(request.versions, tuple) and all(type(item) is int and item >= 0 for item in numbers)
        if not is_plain or len(request.versions) != len(self.parts):
            raise CallError(f"part {part}: a push of worker {request.worker} has no number and versions of all parts")
        rates = request.rates
        if len(rates) != len(self.optimizer.groups) or not all(numpy.isfinite(rate) for rate in rates):
            raise CallError(f"part {part}: a push of worker {request.worker} has learning rates {rates!r}")
        wanted = numpy.int16 if self.push_dtype == BF16 else numpy.float32
        size = self.parts[part].size
        is_array = isinstance(gradient, numpy.ndarray)
        if not is_array or gradient.dtype != wanted or gradient.shape != (size,):
            found = f"{gradient.dtype} {list(gradient.shape)}" if is_array else type(gradient).__name__
            raise CallError(
                f"part {part}: worker {request.worker} pushes {found}, and the part takes {size} numbers of "
                f"{self.push_dtype}: it trains another model"
            )
        return part, request
