"""The batches of an epoch, divided over workers: each once, whatever the loader is."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from undertow.data.examples import Examples
from undertow.train.feeding import Feed, Share, make_train_loader


class Numbers(Examples):
    """Examples that are their own number."""

    def __init__(self):
        pass

    def __len__(self):
        return 70

    def __getitems__(self, indices):
        return torch.tensor(indices)


def make_users_loader():
    return DataLoader(TensorDataset(torch.arange(70)), batch_size=10, shuffle=True, drop_last=True)


@pytest.mark.parametrize("make", [lambda: make_train_loader(Numbers(), 10), make_users_loader])
@pytest.mark.parametrize("first", [0, 3])
def test_workers_see_each_batch_once(make, first):
    def epoch(share):
        found = Feed(make(), seed=5).batches(2, first, share)
        return [tuple((item[0] if isinstance(item, list) else item).tolist()) for item in found]

    whole = epoch(Share())
    assert len(whole) == 7 - first
    for num_workers in (2, 3):
        parts = [epoch(Share(worker, num_workers)) for worker in range(num_workers)]
        assert sorted(sum(parts, [])) == sorted(whole)
        assert parts[0][0] == whole[0] and parts[1][0] == whole[1]
