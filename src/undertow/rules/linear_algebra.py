"""Matrix products: mm, bmm, dot and their forms with an addend, the trilinear form, the inverse.

In: the factors. Out: their cotangents. All formulas are ordinary operations, so the formulation with eager's bits can
be differentiated again.
"""

from __future__ import annotations

import torch

from undertow.rules.registry import Call, Case, Op, Sampler, case, composed, kink, register

aten = torch.ops.aten


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """`factor * tensor`, without the multiplication where eager leaves it out."""
    return tensor if factor == 1 else aten.mul.Scalar(tensor, factor)


def _is_column_major(matrix: torch.Tensor) -> bool:
    return matrix.stride(0) == 1 and matrix.stride(1) == matrix.shape[0]


# y = a b        ct_a = ct_y b^T        ct_b = a^T ct_y
# For a column-major operand eager computes the transposed product, so that the cotangent is column-major too. A product
# and its transpose add in different orders, so the bits depend on the operand's strides.
def _ct_left(ct: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return right.mm(ct.t()).t() if _is_column_major(left) else ct.mm(right.t())


def _ct_right(ct: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return ct.t().mm(left).t() if _is_column_major(right) else left.t().mm(ct)


register(
    Op(
        aten.mm.default,
        vjps=(
            composed(
                self=lambda c, ct: _ct_left(ct, c.self, c.mat2),
                mat2=lambda c, ct: _ct_right(ct, c.self, c.mat2),
            ),
        ),
        samples=lambda draw: [
            case(draw(3, 4), draw(4, 5)),
            case(draw(4, 3).t(), draw(5, 4).t()),
            case(draw(3, 4), draw(5, 4).t()),
            case(draw(4, 1), draw(1, 5)),
            case(draw(6, 4)[::2], draw(4, 10)[:, ::2]),
            case(draw(0, 4), draw(4, 5)),
        ],
    )
)

register(
    Op(
        aten.addmm.default,
        # y = beta b + alpha m1 m2
        vjps=(
            composed(
                self=lambda c, ct: _scaled(ct, c.beta),
                mat1=lambda c, ct: _scaled(_ct_left(ct, c.mat1, c.mat2), c.alpha),
                mat2=lambda c, ct: _scaled(_ct_right(ct, c.mat1, c.mat2), c.alpha),
            ),
        ),
        samples=lambda draw: [
            case(draw(5), draw(3, 4), draw(5, 4).t()),
            case(draw(3, 5), draw(4, 3).t(), draw(4, 5), beta=0.5, alpha=-2),
            case(draw(3, 1), draw(3, 4), draw(4, 5), beta=0),
        ],
    )
)


# y[n] = a[n] b[n]
def _ct_batch_left(ct: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return ct.bmm(right.transpose(1, 2))


def _ct_batch_right(ct: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    return left.transpose(1, 2).bmm(ct)


register(
    Op(
        aten.bmm.default,
        vjps=(
            composed(
                self=lambda c, ct: _ct_batch_left(ct, c.mat2),
                mat2=lambda c, ct: _ct_batch_right(ct, c.self),
            ),
        ),
        samples=lambda draw: [
            case(draw(2, 3, 4), draw(2, 4, 5)),
            case(draw(3, 2, 4).transpose(0, 1), draw(2, 5, 4).transpose(1, 2)),
            kink(draw(1, 3, 4).expand(2, 3, 4), draw(2, 4, 1)),
        ],
    )
)

register(
    Op(
        aten.baddbmm.default,
        # y[n] = beta b[n] + alpha m1[n] m2[n]
        vjps=(
            composed(
                self=lambda c, ct: _scaled(ct, c.beta),
                batch1=lambda c, ct: _scaled(_ct_batch_left(ct, c.batch2), c.alpha),
                batch2=lambda c, ct: _scaled(_ct_batch_right(ct, c.batch1), c.alpha),
            ),
        ),
        samples=lambda draw: [
            case(draw(5), draw(2, 3, 4), draw(2, 4, 5)),
            case(draw(2, 1, 5), draw(2, 3, 4), draw(2, 4, 5), beta=2.5, alpha=-1.5),
        ],
    )
)


# y = beta b + alpha sum_n m1[n] m2[n]: every product receives the same cotangent.
def _for_every_product(c: Call, ct: torch.Tensor) -> torch.Tensor:
    return ct.unsqueeze(0).expand(c.batch1.shape[0], c.batch1.shape[1], c.batch2.shape[2])


register(
    Op(
        aten.addbmm.default,
        vjps=(
            composed(
                self=lambda c, ct: _scaled(ct, c.beta),
                batch1=lambda c, ct: _scaled(_ct_batch_left(_for_every_product(c, ct), c.batch2), c.alpha),
                batch2=lambda c, ct: _scaled(_ct_batch_right(_for_every_product(c, ct), c.batch1), c.alpha),
            ),
        ),
        samples=lambda draw: [
            case(draw(3, 5), draw(2, 3, 4), draw(2, 4, 5)),
            case(draw(5), draw(2, 3, 4), draw(2, 4, 5), beta=0.5, alpha=3),
        ],
    )
)

register(
    Op(
        aten.mv.default,
        # y = m v        ct_m = ct_y v^T        ct_v = m^T ct_y
        vjps=(composed(self=lambda c, ct: ct.outer(c.vec), vec=lambda c, ct: c.self.t().mv(ct)),),
        samples=lambda draw: [case(draw(3, 4), draw(4)), case(draw(4, 3).t(), draw(8)[::2])],
    )
)

register(
    Op(
        aten.addmv.default,
        # y = beta b + alpha m v
        vjps=(
            composed(
                self=lambda c, ct: _scaled(ct, c.beta),
                mat=lambda c, ct: _scaled(ct.outer(c.vec), c.alpha),
                vec=lambda c, ct: _scaled(c.mat.t().mv(ct), c.alpha),
            ),
        ),
        samples=lambda draw: [
            case(draw(3), draw(3, 4), draw(4)),
            case(draw(1), draw(4, 3).t(), draw(4), beta=0.5, alpha=2),
        ],
    )
)

register(
    Op(
        aten.addr.default,
        # y = beta b + alpha u v^T        ct_u = alpha ct_y v        ct_v = alpha ct_y^T u
        vjps=(
            composed(
                self=lambda c, ct: _scaled(ct, c.beta),
                vec1=lambda c, ct: _scaled(ct.mv(c.vec2), c.alpha),
                vec2=lambda c, ct: _scaled(ct.t().mv(c.vec1), c.alpha),
            ),
        ),
        samples=lambda draw: [
            case(draw(3, 4), draw(3), draw(4)),
            case(draw(4), draw(3), draw(4), beta=-0.5, alpha=2),
        ],
    )
)

register(
    Op(
        aten.dot.default,
        # y = sum a b
        vjps=(composed(self=lambda c, ct: ct * c.tensor, tensor=lambda c, ct: ct * c.self),),
        samples=lambda draw: [case(draw(4), draw(4)), case(draw(8)[::2], draw(4))],
    )
)

register(
    Op(
        aten.vdot.default,
        # On real vectors the conjugated product is the plain one.
        vjps=(composed(self=lambda c, ct: ct * c.other, other=lambda c, ct: ct * c.self),),
        samples=lambda draw: [case(draw(4), draw(4))],
    )
)


# y = sum over `sumdim` of i1 i2 i3, each with the dims that it lacks inserted where its `expand` says. The cotangent of
# one factor is the trilinear form of the other two and ct_y: ct_y lacks the summed dims, and the sum goes over the dims
# that the factor lacks.
def _trilinear_samples(draw: Sampler) -> list[Case]:
    first, weight, second = draw(3, 4), draw(2, 4, 5), draw(3, 5)
    return [
        case(first, weight, second, [1, 3], [0], [1, 2], [2, 3]),
        case(draw(3, 4), draw(3, 4), draw(3, 4), [], [], [], [1]),
    ]


register(
    Op(
        aten._trilinear.default,
        vjps=(
            composed(
                i1=lambda c, ct: aten._trilinear(ct, c.i2, c.i3, c.sumdim, c.expand2, c.expand3, c.expand1),
                i2=lambda c, ct: aten._trilinear(c.i1, ct, c.i3, c.expand1, c.sumdim, c.expand3, c.expand2),
                i3=lambda c, ct: aten._trilinear(c.i1, c.i2, ct, c.expand1, c.expand2, c.sumdim, c.expand3),
            ),
        ),
        samples=_trilinear_samples,
    )
)

register(
    Op(
        aten.linalg_inv_ex.default,
        # y = a^-1        ct_a = -y^T ct_y y^T
        vjps=(composed(A=lambda c, ct, _: -(c.out.mT.matmul(ct.matmul(c.out.mT)))),),
        samples=lambda draw: [
            case(draw(3, 3) + 3 * torch.eye(3, dtype=torch.float64)),
            case(draw(2, 3, 3) + 3 * torch.eye(3, dtype=torch.float64)),
        ],
    )
)

register(
    Op(
        aten.linalg_cross.default,
        # y = a x b        ct_a = b x ct_y        ct_b = ct_y x a
        vjps=(
            composed(
                self=lambda c, ct: aten.linalg_cross(c.other, ct, dim=c.dim),
                other=lambda c, ct: aten.linalg_cross(ct, c.self, dim=c.dim),
            ),
        ),
        samples=lambda draw: [case(draw(2, 3), draw(2, 3)), case(draw(3, 1), draw(3, 4), dim=0)],
    )
)
