"""What the tests of operations share."""

import pytest
import torch


@pytest.fixture(params=[1, 2])
def threads(request):
    """A number of threads for the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
