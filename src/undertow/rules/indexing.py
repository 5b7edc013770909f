"""Reading and writing at positions given by tensors: index, gather, scatter, masks, embeddings.

In: the integer or boolean tensors that give the positions. Out: the cotangent of an element that was read is added at
the position it was read from; an element that was written gets the cotangent at the position it was written to.

With a boolean index, and for the value of `masked_fill`, eager makes a tensor whose size depends on the mask; so do
these formulas.
"""

import torch

from undertow.rules.registry import Call, Op, Sampler, case, composed, fused, kink, register

aten = torch.ops.aten
Tensor = torch.Tensor


def _zeros_of(tensor: Tensor, ct: Tensor) -> Tensor:
    return ct.new_zeros(tensor.shape, dtype=tensor.dtype)


# y = x[i]        ct_x = ct added at i into zeros
register(
    Op(
        aten.index.Tensor,
        (composed(self=lambda c, ct: aten.index_put(_zeros_of(c.self, ct), c.indices, ct, True)),),
        lambda draw: [
            case(draw(3, 4), [draw.integers(3, 5)]),
            case(draw(4, 3).t(), [draw.integers(3, 5), draw.integers(4, 5)]),
            case(draw(2, 3, 4), [None, draw.integers(3, 2, 2)]),
            case(draw(2, 3, 4), [draw.integers(2, 3), None, draw.integers(4, 1)]),
            case(draw(3, 4), [draw.booleans(3, 4)]),
            case(draw(3, 4), [torch.tensor([True, False, True])]),
        ],
    )
)


def _index_put_self(c: Call, ct: Tensor) -> Tensor:
    return ct if c.accumulate else aten.index_put(ct, c.indices, c.values.new_zeros(c.values.shape))


register(
    Op(
        aten.index_put.default,
        # y = x with y[i] = v, or += v        ct_x = ct, zero at i unless added        ct_v = ct[i]
        (composed(self=_index_put_self, values=lambda c, ct: aten.index(ct, c.indices)),),
        lambda draw: [
            case(draw(3, 4), [torch.tensor([2, 0])], draw(2, 4)),
            case(draw(4, 3).t(), [torch.tensor([2, 0])], draw(4)),
            case(draw(3, 4), [draw.integers(3, 5)], draw(5, 1), True),
            case(draw(3, 4), [draw.booleans(3, 4)], draw()),
            case(draw(3, 4), [None, torch.tensor([1, 3])], draw(3, 2)),
        ],
    )
)

# y = x at i along a dim        ct_x = ct added at i into zeros
register(
    Op(
        aten.index_select.default,
        (composed(self=lambda c, ct: _zeros_of(c.self, ct).index_add(c.dim, c.index, ct)),),
        lambda draw: [
            case(draw(3, 4), 0, draw.integers(3, 5)),
            case(draw(2, 4, 3).transpose(0, 2), -2, draw.integers(4, 5)),
            case(draw(), 0, torch.tensor([0])),
        ],
    )
)


# y = x with v added, written or a constant put at i along a dim
def _index_source(c: Call, ct: Tensor) -> Tensor:
    if c.source.dim() == 0:
        return ct.index_select(c.dim, c.index.squeeze(0))
    return ct.index_select(c.dim, c.index).expand(c.source.shape)


def _index_add_source(c: Call, ct: Tensor) -> Tensor:
    ct_source = _index_source(c, ct)
    return ct_source if c.alpha == 1 else ct_source * c.alpha


register(
    Op(
        aten.index_add.default,
        (composed(self=lambda c, ct: ct, source=_index_add_source),),
        lambda draw: [
            case(draw(3, 4), 0, draw.integers(3, 5), draw(5, 4)),
            case(draw(4, 3).t(), 1, draw.integers(4, 5), draw(3, 5), alpha=2),
        ],
    )
)
register(
    Op(
        aten.index_copy.default,
        (composed(self=lambda c, ct: ct.index_fill(c.dim, c.index, 0), source=_index_source),),
        lambda draw: [
            case(draw(3, 4), 0, torch.tensor([2, 0]), draw(2, 4)),
            case(draw(4, 3).t(), -1, torch.tensor([1]), draw(3, 1)),
        ],
    )
)
register(
    Op(
        aten.index_fill.int_Scalar,
        (composed(self=lambda c, ct: ct.index_fill(c.dim, c.index, 0)),),
        lambda draw: [case(draw(3, 4), 0, torch.tensor([2, 0]), 1.5), case(draw(4, 3).t(), -1, torch.tensor([1]), 1)],
    )
)
register(
    Op(
        aten.index_fill.int_Tensor,
        (
            composed(
                self=lambda c, ct: ct.index_fill(c.dim, c.index, 0),
                value=lambda c, ct: ct.index_select(c.dim, aten._unique(c.index, sorted=False)[0]).sum(),
            ),
        ),
        lambda draw: [case(draw(3, 4), 0, torch.tensor([2, 0, 2]), draw())],
    )
)


def _gathered(draw: Sampler) -> list[tuple[Tensor, int, Tensor]]:
    """x, a dim, and distinct positions along it, fewer than x has."""
    return [
        (draw(3, 4), 1, torch.tensor([[0, 3], [2, 1], [3, 2]])),
        (draw(4, 3).t(), 0, torch.tensor([[2, 0, 1, 1], [0, 1, 2, 0]])),
        (draw(2, 3, 4).transpose(0, 2), -2, torch.tensor([[[1], [0]], [[2], [1]]])),
    ]


# y = x gathered at i        ct_x = ct added at i into zeros
register(
    Op(
        aten.gather.default,
        (composed(self=lambda c, ct: ct.new_zeros(c.self.shape).scatter_add(c.dim, c.index, ct)),),
        lambda draw: [
            *(case(*arguments) for arguments in _gathered(draw)),
            case(draw(3, 4), 1, draw.integers(4, 3, 6)),
            case(draw(), 0, torch.tensor(0)),
        ],
    )
)

# y = x with v written at i        ct_x = ct with zeros at i        ct_v = ct gathered at i
register(
    Op(
        aten.scatter.src,
        (
            composed(
                self=lambda c, ct: ct.scatter(c.dim, c.index, 0),
                src=lambda c, ct: ct.gather(c.dim, c.index),
            ),
        ),
        lambda draw: [case(x, dim, index, draw(*index.shape)) for x, dim, index in _gathered(draw)],
    )
)
register(
    Op(
        aten.scatter.value,
        (composed(self=lambda c, ct: ct.scatter(c.dim, c.index, 0)),),
        lambda draw: [case(*arguments, 1.5) for arguments in _gathered(draw)],
    )
)
register(
    Op(
        aten.scatter_add.default,
        (composed(self=lambda c, ct: ct, src=lambda c, ct: ct.gather(c.dim, c.index)),),
        lambda draw: [
            *(case(x, dim, index, draw(*index.shape)) for x, dim, index in _gathered(draw)),
            case(draw(3, 4), 1, draw.integers(4, 3, 6), draw(3, 6)),
        ],
    )
)

# y = x read or written as if flat
register(
    Op(
        aten.take.default,
        (composed(self=lambda c, ct: aten.zeros_like(c.self).put(c.index, ct, True)),),
        lambda draw: [case(draw(3, 4), draw.integers(12, 5)), case(draw(4, 3).t(), draw.integers(12, 2, 2))],
    )
)


def _put_self(c: Call, ct: Tensor) -> Tensor:
    return ct if c.accumulate else ct.put(c.index, c.source.new_zeros(c.source.shape))


register(
    Op(
        aten.put.default,
        (composed(self=_put_self, source=lambda c, ct: ct.take(c.index).reshape(c.source.shape)),),
        lambda draw: [
            case(draw(3, 4), torch.tensor([5, 0]), draw(2)),
            case(draw(4, 3).t(), draw.integers(12, 5), draw(5), True),
        ],
    )
)

# y = x with v where the mask is true        ct_x = ct with zeros there        ct_v = the sum of ct there
register(
    Op(
        aten.masked_fill.Scalar,
        (composed(self=lambda c, ct: ct.masked_fill(c.mask, 0)),),
        lambda draw: [
            case(draw(3, 4), draw.booleans(3, 4), 1.5),
            kink(draw(4, 3).t(), draw.booleans(4), float("-inf")),
            case(draw(4, 3).t(), draw.booleans(4), 2),
            case(draw(4), draw.booleans(3, 4), 0),
        ],
    )
)
register(
    Op(
        aten.masked_fill.Tensor,
        (
            composed(
                self=lambda c, ct: ct.masked_fill(c.mask, 0),
                value=lambda c, ct: ct.masked_select(c.mask).sum(),
            ),
        ),
        lambda draw: [case(draw(3, 4), draw.booleans(3, 4), draw()), case(draw(4, 3).t(), draw.booleans(4), draw())],
    )
)


# y = the elements of x where the mask is true, in order        ct_x = ct there, 0 elsewhere
def _masked_select(c: Call, ct: Tensor) -> Tensor:
    zeros = aten.zeros_like(c.self.expand(torch.broadcast_shapes(c.self.shape, c.mask.shape)))
    scattered = zeros.masked_scatter(c.mask, ct)
    if zeros.is_contiguous():
        return scattered
    # Eager scatters in place into zeros with the layout of x.
    order = sorted(range(zeros.dim()), key=zeros.stride, reverse=True)
    return scattered.permute(order).contiguous().permute([order.index(dim) for dim in range(zeros.dim())])


register(
    Op(
        aten.masked_select.default,
        (composed(self=_masked_select),),
        lambda draw: [
            case(draw(3, 4), draw.booleans(3, 4)),
            case(draw(4, 3).t(), draw.booleans(4)),
            case(draw(4), draw.booleans(3, 4)),
        ],
    )
)


def _masked_scatter_source(c: Call, ct: Tensor) -> Tensor:
    mask = c.mask.expand(ct.shape).reshape(-1)
    position = (mask.cumsum(0) - 1).clamp(min=0)
    taken = aten.where(mask, ct.reshape(-1), 0.0)
    return ct.new_zeros(c.source.numel()).index_add(0, position, taken).view(c.source.shape)


register(
    Op(
        aten.masked_scatter.default,
        # y = x with the elements of s, in order, where the mask is true        ct_s = ct there, 0 for unused elements
        (
            fused(
                self=lambda c, ct: ct.masked_fill(c.mask, 0),
                source=lambda c, ct: aten.masked_scatter_backward(ct, c.mask, c.source.shape),
            ),
            composed(self=lambda c, ct: ct.masked_fill(c.mask, 0), source=_masked_scatter_source),
        ),
        lambda draw: [
            case(draw(3, 4), draw.booleans(3, 4), draw(4, 3)),
            case(draw(4, 3).t(), draw.booleans(4), draw(15)),
        ],
    )
)


# y = rows of w        ct_w = ct added at the rows, 0 at the padding row, divided by the row's count if so requested
def _embedding_composed(c: Call, ct: Tensor) -> Tensor:
    rows, ct = c.indices.reshape(-1), ct.reshape(-1, c.weight.shape[1])
    if c.scale_grad_by_freq:
        count = ct.new_zeros(c.weight.shape[0]).index_add(0, rows, aten.ones_like(rows, dtype=ct.dtype))
        ct = ct / count.index_select(0, rows).unsqueeze(1)
    ct = aten.where((rows == c.padding_idx).unsqueeze(1), 0.0, ct)
    return ct.new_zeros(c.weight.shape).index_add(0, rows, ct)


register(
    Op(
        aten.embedding.default,
        (
            fused(
                weight=lambda c, ct: aten.embedding_backward(
                    ct, c.indices, c.weight.shape[0], c.padding_idx, c.scale_grad_by_freq, c.sparse
                ),
            ),
            composed(weight=_embedding_composed),
        ),
        lambda draw: [
            case(draw(5, 3), draw.integers(5, 2, 4)),
            case(draw(3, 5).t(), draw.integers(5, 7)),
            case(draw(5, 3), torch.tensor(2)),
            kink(draw(5, 3), draw.integers(5, 2, 4), 1),
            kink(draw(5, 3), draw.integers(5, 7), 1, True),
        ],
    )
)
