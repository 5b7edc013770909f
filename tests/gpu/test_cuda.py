"""On a CUDA device: the same bits as eager, with deterministic kernels."""

import copy

import pytest
import torch
from exactness import same_bits
from torch import nn

import undertow as ut

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Flatten(),
        nn.Linear(8 * 64, 5),
    )  # fmt: skip


def transformer():
    return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)


class TwoDevices(nn.Module):
    """The first layer on the CPU, the second on the GPU: transfers are operations."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.cpu())).cuda())


@pytest.mark.parametrize(("make", "shape"), [(convnet, (4, 3, 8, 8)), (transformer, (2, 16, 32)), (TwoDevices, (4, 8))])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_same_bits_as_eager(make, shape, autocast):
    torch.manual_seed(0)
    eager = make()
    if make is TwoDevices:
        eager.second.cuda()
    else:
        eager.cuda()
    copied = copy.deepcopy(eager)
    x = torch.randn(shape, device="cuda")
    results = []
    previous, torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic, True
    try:
        for model in (eager, ut.plan(copied, (x,))):
            torch.manual_seed(3)
            for _ in range(2):
                with torch.autocast("cuda", autocast, enabled=autocast is not None):
                    loss = model(x).float().square().mean()
                loss.backward()
            results.append([loss, *(item.grad for item in model.parameters()), *model.buffers()])
            results[-1].append(torch.cuda.get_rng_state())
    finally:
        torch.backends.cudnn.deterministic = previous
    assert [index for index, pair in enumerate(zip(*results, strict=True)) if not same_bits(*pair)] == []
