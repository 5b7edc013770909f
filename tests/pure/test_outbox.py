"""What waits to be sent to one other rank: the order, and ends that nobody waits for in vain."""

import threading

import pytest
import torch

from undertow.ranks.messages import CHUNK_BYTES, BrokenConnection, Outbox, Sending

PATIENCE_S = 30  # far more than anything here takes


class Post:
    """Takes the place of gloo: notes what is sent, and lets each chunk wait for `gate`."""

    def __init__(self, error=None):
        self.sent, self.error = [], error
        self.gate, self.has_begun = threading.Event(), threading.Event()

    def __call__(self, chunk, tag):
        self.sent.append((tag, chunk.numel()))
        self.has_begun.set()
        return self

    def wait(self):
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error


def message(tag, num_bytes=10):
    return Sending(torch.zeros(num_bytes, dtype=torch.uint8), tag)


def test_the_most_urgent_goes_first_between_chunks():
    post = Post()
    outbox = Outbox(1, post)
    long, late, soon = message(1, 2 * CHUNK_BYTES + 5), message(2), message(3)
    outbox.add(long, (5,))
    assert post.has_begun.wait(PATIENCE_S)
    outbox.add(late, (9,))
    outbox.add(soon, ())
    post.gate.set()
    for item in (long, late, soon):
        item.wait()
    assert post.sent == [(1, CHUNK_BYTES), (3, 10), (1, CHUNK_BYTES), (1, 5), (2, 10)]
    outbox.close()
    outbox.join(PATIENCE_S)


@pytest.mark.parametrize("error", [BrokenConnection(1, "gone"), ValueError("what nobody expected")])
def test_whoever_waits_for_a_message_is_told(error):
    post = Post(error)
    post.gate.set()
    outbox = Outbox(1, post)
    broken = message(1, 3 * CHUNK_BYTES)
    outbox.add(broken, ())
    with pytest.raises(BrokenConnection, match="gone|what nobody expected"):
        broken.wait()
    assert len(post.sent) == 1  # the other chunks of a broken message are not tried
    post.error = None
    other = message(2)
    outbox.add(other, ())
    other.wait()
    outbox.close()
    outbox.join(PATIENCE_S)


def test_closing_ends_what_waits_behind_a_chunk_that_is_stuck():
    post = Post()
    outbox = Outbox(1, post)
    stuck, behind = message(1), message(2)
    outbox.add(stuck, ())
    assert post.has_begun.wait(PATIENCE_S)
    outbox.add(behind, ())
    outbox.close()
    outbox.join(0.01)  # the thread is still with the stuck chunk, and closing does not wait for it
    assert not stuck.is_sent.is_set()
    post.gate.set()
    with pytest.raises(BrokenConnection, match="leaves the job"):
        behind.wait()
    stuck.wait()
    assert [tag for tag, _ in post.sent] == [1]
