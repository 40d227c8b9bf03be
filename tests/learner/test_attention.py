import numpy as np
import pytest
import torch
import torch.nn.functional as F

from roost.learner.attention import Segments, _by_length


@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((4,), id="one"),
        pytest.param((3, 3, 3), id="alike"),
        pytest.param((5, 2, 5, 1, 2, 7), id="several of some lengths, out of order"),
    ],
)
@pytest.mark.parametrize("window", [None, 2], ids=["all", "window"])
def test_packed_sequences_are_as_each_alone(lengths, window):
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, sum(lengths), 8, requires_grad=True) for heads in (4, 2, 2)]
    segments = Segments.of(np.concatenate([[0], np.cumsum(lengths)]), torch.device("cpu"))
    packed = _by_length(*tensors, segments, 0.3, window)
    alone = torch.cat(
        [_alone(*each, window) for each in zip(*(each.split(lengths, 2) for each in tensors), strict=True)]
    )
    assert packed.shape == (1, sum(lengths), 4, 8)
    torch.testing.assert_close(packed[0], alone)
    gradients = [torch.autograd.grad(output.square().sum(), tensors) for output in (packed, alone)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def _alone(query, key, value, window):
    """Positions that a sequence attends to: itself and what came before, no further back than the window."""
    key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    places = torch.arange(query.shape[2])
    distance = places[:, None] - places[None, :]
    mask = (distance >= 0) & (distance < (window or len(places)))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)[0].transpose(0, 1)
