"""A small model for the tests of the parameter server: what a worker computes, and what must come out of it."""

import time

import torch

from undertow.ranks.tree import Span, Tree

NUM_EXAMPLES = 8


def make_model():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3))


def batch_of(number):
    draw = torch.Generator().manual_seed(number)
    return torch.randn(NUM_EXAMPLES, 6, generator=draw), torch.randn(NUM_EXAMPLES, 3, generator=draw)


def loss_of(model, number, share=1.0):
    x, target = batch_of(number)
    return torch.nn.functional.mse_loss(model(x), target) * share


class SmallComputing:
    """`pause_s` is waited for in each batch, so that faults hit while there is something to do."""

    def __init__(self, share=1.0, pause_s=0.0, bad_number=None, width=50):
        torch.set_num_threads(1)
        self.model, self.share, self.pause_s, self.bad_number = make_model(), share, pause_s, bad_number
        if width != 50:
            self.model[2] = torch.nn.Linear(width, 3)

    def parameters(self):
        return dict(self.model.named_parameters())

    def prepare(self, take):
        self.take = take
        return {"peak_bytes": 0, "shared": {}}

    def compute(self, number):
        time.sleep(self.pause_s)
        self.model.zero_grad()
        loss = loss_of(self.model, number, self.share)
        loss.backward()
        for name, parameter in reversed(self.parameters().items()):
            if number == self.bad_number:
                parameter.grad[..., 0] = float("nan")
            self.take(name, parameter.grad)
        return float(loss.detach()), NUM_EXAMPLES

    def buffers(self):
        return {}


def train_in_step(optimizer_of, num_updates, round_size):
    """The same in one process: each update by the sum over its batches, in the order of the tree."""
    model = make_model()
    optimizer = optimizer_of(model.parameters())
    tree = Tree(round_size)
    order = tree.add_order([Span(index, index + 1) for index in range(round_size)])
    for update in range(num_updates):
        gradients = []
        for number in range(update * round_size, (update + 1) * round_size):
            model.zero_grad()
            loss_of(model, number, 1 / round_size).backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        for left, right in order:
            gradients[left] = [a + b for a, b in zip(gradients[left], gradients[right], strict=True)]
        for parameter, gradient in zip(model.parameters(), gradients[0], strict=True):
            parameter.grad = gradient
        optimizer.step()
    return model, optimizer
