"""Instances made for tests: training steps like those of transformers, chains and U-Nets, and tiny random ones."""

from __future__ import annotations

import random

from undertow.planner.instance import Instance, make_instance


class _Tape:
    """Records forward kinds and derives a backward pass: one kind per forward kind, sums where cotangents meet."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.durations: list[int] = []
        self.reads: list[list[int]] = []
        self.writes: list[list[int]] = []
        self.records: list[tuple[list[int], int, list[int], int]] = []

    def value(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def kind(self, duration: int, reads: list[int], writes: list[int]) -> None:
        self.durations.append(duration)
        self.reads.append(sorted(set(reads)))
        self.writes.append(writes)

    def forward(self, duration: int, inputs: list[int], size: int, saves: list[int] | None = None) -> int:
        """`saves` are the inputs the backward kind reads; -1 stands for the output."""
        output = self.value(size)
        self.kind(duration, inputs, [output])
        saved = [output if value == -1 else value for value in (inputs if saves is None else saves)]
        self.records.append((inputs, output, saved, duration))
        return output

    def backward(self, loss: int) -> Instance:
        cotangents: dict[int, list[int]] = {loss: [self.value(self.sizes[loss])]}
        self.kind(1, [loss], [cotangents[loss][0]])
        gradients = []
        for inputs, output, saved, duration in reversed(self.records):
            parts = cotangents.pop(output)
            while len(parts) > 1:
                total = self.value(self.sizes[output])
                self.kind(5, parts[:2], [total])
                parts = [total, *parts[2:]]
            made = [self.value(self.sizes[value]) for value in inputs]
            gradient = self.value(0)
            gradients.append(gradient)
            self.kind(2 * duration, [parts[0], *saved], [*made, gradient])
            for value, part in zip(inputs, made, strict=True):
                cotangents.setdefault(value, []).append(part)
        return make_instance(self.sizes, self.durations, self.reads, self.writes, targets=gradients)


def transformer(num_layers: int) -> Instance:
    tape = _Tape()
    stream = tape.forward(10, [], 100)
    for _ in range(num_layers):
        normed = tape.forward(12, [stream], 100)
        query, key, item = (tape.forward(100, [normed], 100) for _ in range(3))
        scores = tape.forward(60, [query, key], 300)
        weights = tape.forward(30, [scores], 300, [-1])
        mixed = tape.forward(60, [weights, item], 100)
        projected = tape.forward(100, [mixed], 100)
        stream = tape.forward(8, [stream, projected], 100, [])
        normed = tape.forward(12, [stream], 100)
        hidden = tape.forward(400, [normed], 400)
        active = tape.forward(40, [hidden], 400)
        projected = tape.forward(400, [active], 100)
        stream = tape.forward(8, [stream, projected], 100, [])
    return tape.backward(tape.forward(20, [stream], 1))


def chain(length: int, seed: int = 0) -> Instance:
    draw = random.Random(seed)
    tape = _Tape()
    value = tape.forward(10, [], 100)
    for _ in range(length):
        value = tape.forward(draw.randint(5, 50), [value], draw.randint(20, 200))
    return tape.backward(tape.forward(5, [value], 1))


def unet(depth: int, width: int) -> Instance:
    tape = _Tape()
    value = tape.forward(10, [], 1 << (2 * depth))
    skips = []
    for level in range(depth):
        for _ in range(width):
            value = tape.forward(50 + 7 * level, [value], 1 << (2 * (depth - level)))
        skips.append(value)
        value = tape.forward(5, [value], 1 << (2 * (depth - level - 1)))
    for level in reversed(range(depth)):
        value = tape.forward(20, [value], 1 << (2 * (depth - level)))
        value = tape.forward(10, [value, skips[level]], 2 << (2 * (depth - level)))
        for _ in range(width):
            value = tape.forward(50 + 7 * level, [value], 1 << (2 * (depth - level)))
    return tape.backward(tape.forward(5, [value], 1))


def tiny(seed: int) -> Instance:
    """At most seven kinds: formulations, destroyed inputs, kinds that run once, workspace, reuse, initial values."""
    draw = random.Random(seed)
    sizes = [draw.randint(0, 6) for _ in range(draw.randint(0, 2))]
    initial = list(range(len(sizes)))
    durations: list[int] = []
    reads: list[list[int]] = []
    writes: list[list[int]] = []
    destroys: list[list[int]] = []
    reuse: list[tuple[int, int]] = []
    alive = list(initial)
    order: list[int] = []
    for _ in range(draw.randint(2, 5)):
        row = sorted(draw.sample(alive, min(len(alive), draw.randint(0, 2))))
        made = [len(sizes)]
        sizes.append(draw.randint(0, 9))
        if draw.random() < 0.15:
            made.append(len(sizes))
            sizes.append(draw.randint(0, 4))
        destroyed = [value for value in row if draw.random() < 0.12]
        alive = [value for value in alive if value not in destroyed] + made
        order.append(len(durations))
        durations.append(draw.randint(0, 9))
        reads.append(row)
        writes.append(made)
        destroys.append(destroyed)
        reuse.append((row[0], made[0]) if row and draw.random() < 0.3 else (-1, -1))
        if draw.random() < 0.3 and len(durations) < 7:
            others = [value for value in range(made[0]) if draw.random() < 0.4][:2]
            durations.append(draw.randint(0, 9))
            reads.append(others)
            writes.append(made[:1])
            destroys.append([])
            reuse.append((-1, -1))
    targets = sorted({alive[-1], *(value for value in alive if draw.random() < 0.1)})
    return make_instance(
        sizes,
        durations,
        reads,
        writes,
        destroys=destroys,
        workspace_bytes=[draw.choice([0, 0, 0, 3]) for _ in durations],
        can_repeat=[draw.random() < 0.85 for _ in durations],
        reuse=reuse,
        order=order,
        initial=initial,
        targets=targets,
        fixed_bytes=draw.choice([0, 5]),
    )
