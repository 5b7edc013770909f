"""Random tensor programs for comparisons with eager PyTorch.

In: a seed. Out: a RandomProgram, whose listing is Python source to paste and run. Statements are drawn from a table of
templates with random operands, tried out on real tensors, and kept when eager PyTorch accepts them and the result is
small and tame: the table need not know which shapes, dtypes and writes are legal. An in-place write is tried only on
memory that nothing saved for its backward pass, which the hooks of autograd tell.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

MAX_ELEMENTS = 400
MAX_MAGNITUDE = 1e3  # beyond, a few products more would leave nothing but infinities to compare
MAX_TRIES = 12
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16)
SHAPES = (
    (), (4,), (3,), (1, 4), (3, 1), (3, 4), (4, 3), (4, 4), (2, 3, 4), (2, 4, 3), (2, 1, 4),
    (2, 3, 4, 4), (2, 3, 5, 4), (3, 3, 3, 3), (2, 3, 2, 2), (3, 1, 3, 3),
)  # fmt: skip

# {a}, {b}, {c}: any values; {s}, {t}: the dtype of {a}, by a cast where necessary; {w}: memory that may be written;
# {d}: a dimension; {k}: a small index; {x}: a number.
FAMILIES = {
    "unary": """
        torch.sin({a}); torch.cos({a}); torch.tanh({a}); torch.sigmoid({a}); torch.relu({a}); torch.exp(-{a}.abs());
        F.gelu({a}); F.gelu({a}, approximate="tanh"); F.silu({a}); F.softplus({a}); F.elu({a});
        F.leaky_relu({a}, 0.1); F.hardswish({a}); torch.erf({a}); {a}.abs(); -{a}; 1 / ({a}.abs() + 1);
        torch.log1p({a}.abs()); ({a}.abs() + 0.5).sqrt(); ({a} * {a} + 1).rsqrt(); {a} ** 2; {a} ** 3;
        {a}.clamp(-1, 1); {a} * {x}; {x} - {a}; {a} / {x}; F.mish({a}); F.logsigmoid({a}); torch.expm1(-{a}.abs());
        {a}.clone(); F.hardtanh({a}); torch.atan({a})""",
    "binary": """
        {a} + {b}; {a} - {b}; {a} * {b}; {a} / ({b}.abs() + 1); torch.maximum({a}, {b}); torch.minimum({a}, {b});
        torch.add({a}, {b}, alpha=0.3); {a} * {a} + {a}; torch.lerp({a}, {s}, 0.3); torch.atan2({a}, {s});
        torch.addcmul({a}, {s}, {t}, value=0.5); torch.where({a} > {b}, {a}, {b}); torch.where({a} > 0, {a}, {b});
        torch.where({b} < 0.5, {a}, 0.0); {a} * {b} - {b} * {c}; torch.hypot({a}, {s}); torch.logaddexp({a}, {s});
        torch.addcdiv({a}, {s}, {t}.abs() + 1); F.mse_loss({a}, {s}, reduction="none");
        ({a}.abs() + 0.5) ** {b}.tanh()""",
    "matrix": """
        {a} @ {s}; {a} @ {s}.mT; {a}.mT @ {s}; {a}.mT @ {s}.mT; torch.mm({a}, {s}.t()); torch.mm({a}.t(), {s});
        torch.bmm({a}, {s}.mT); torch.bmm({a}.mT, {s}); F.linear({a}, {s}); F.linear({a}, {s}, {t});
        torch.addmm({a}, {a} @ {a}.mT, {s}); torch.baddbmm({a}, {a} @ {a}.mT, {s}); torch.outer({a}, {s});
        torch.dot({a}, {s}); {a} @ {a}.mT; {a}.mT @ {a}; torch.einsum("ij,kj->ik", {a}, {s});
        F.scaled_dot_product_attention({a}, {a}, {s}); torch.einsum("bij,bkj->bik", {a}, {s}); {a}[..., None] * {s}""",
    "convolution": """
        F.conv2d({a}, {s}, padding=1); F.conv2d({a}, {s}, stride=2, padding=1);
        F.conv2d({a}, {s}, {s}[:, 0, 0, 0], padding=1); F.conv2d({a}, {s}[:, :1], groups={a}.shape[1]);
        F.conv2d({a}.contiguous(memory_format=torch.channels_last), {s}, padding=1); F.conv1d({a}, {s}, padding=1);
        F.conv_transpose2d({a}, {s}, stride=2); F.conv2d({a}, {a}[:3], padding=2);
        F.conv1d({a}, {s}.mT, dilation=2, padding=2)""",
    "normalization": """
        F.layer_norm({a}, {a}.shape[-1:]); F.layer_norm({a}, {a}.shape[-1:], {s}, -{s});
        F.layer_norm({a}, {a}.shape[-2:]); F.rms_norm({a}, {a}.shape[-1:]); F.group_norm({a}, 1);
        F.batch_norm({a}, None, None, training=True); F.batch_norm({a}, None, None, {s}, -{s}, training=True);
        F.normalize({a}, dim={d}); F.softmax({a}, {d}); F.log_softmax({a}, {d}); torch.logsumexp({a}, {d});
        F.instance_norm({a}); F.cross_entropy({a}, torch.arange(len({a})) % {a}.shape[1])""",
    "reduction": """
        {a}.sum(); {a}.sum({d}); {a}.sum({d}, keepdim=True); {a}.mean(); {a}.mean({d}); {a}.mean({d}, keepdim=True);
        {a}.amax({d}); {a}.max({d}).values; {a}.max(); {a}.min({d})[0]; {a}.var({d}); {a}.std({d}, keepdim=True);
        {a}.norm(); {a}.norm(dim={d}); {a}.cumsum({d}); {a}.prod({d}); {a}.sort({d}).values; {a}.topk(2, {d})[0];
        {a}.median({d}).values; {a}.cumprod({d}); {a}.sum((0, -1)); F.l1_loss({a}, {s}); F.smooth_l1_loss({a}, {s});
        {a}.diagonal().sum()""",
    "view": """
        {a}.transpose(0, 1); {a}.mT; {a}.movedim(0, -1); {a}.permute(2, 0, 1); {a}.permute(0, 2, 3, 1);
        {a}.reshape(-1); {a}.reshape(-1, 2); {a}.flatten(1); {a}.unsqueeze({d}); {a}.squeeze(); {a}[{k}];
        {a}[:, {k}]; {a}[..., 1:]; {a}[1:, ..., ::2]; {a}[:, :-1]; {a}[None]; {a}.expand(2, *{a}.shape);
        {a}.expand(3, 4); {a}.narrow({d}, 0, 2); {a}.diagonal(); {a}.unfold({d}, 2, 1); {a}.contiguous(); {a}.t();
        {a}.view(2, -1); {a}.flip({d}); {a}.roll(1, {d}); {a}.tril(); {a}.repeat(2, 1, 1); F.pad({a}, (1, 0));
        F.pad({a}, (0, 1, 1, -1)); {a}.repeat_interleave(2, {d}); {a}.swapaxes(-1, -2)""",
    "joining": """
        torch.cat(({a}, {b}), {d}); torch.cat(({a}, {b}, {a}), {d}); torch.stack(({a}, {s}), {d});
        torch.stack(({a}, {a}, {a})); torch.hstack(({a}, {b})); torch.cat(({a}.mT, {b}), {d});
        torch.stack({a}.unbind({d})[::-1])""",
    "splitting": """
        {a}.split(2, {d}); {a}.chunk(2, {d}); {a}.unbind({d}); {a}.split((1, 2), {d});
        torch.tensor_split({a}, 2, {d}); {a}.max({d}).values, {a}.min({d}).values; torch.var_mean({a}, {d})""",
    "indexing": """
        {a}[[0, 1, 0]]; {a}[:, [1, 1]]; {a}[torch.arange(2)]; {a}[{a} > 0]; {a}.masked_fill({a} > 0.5, {x});
        {a}.masked_fill({b} > 0, -1.0); {a}.gather({d}, {a}.argsort({d}));
        {a}.gather(-1, {a}.argmax(-1, keepdim=True)); {a}.index_select({d}, torch.arange(2));
        F.embedding(torch.arange(3) % 2, {a}); {a}.index_add(0, torch.tensor([0, 1, 0]), {s});
        {a}.scatter_add({d}, {a}.argsort({d}), {a}); {a}[torch.tensor([0, 1]), torch.tensor([1, 0])];
        {a}.take_along_dim({a}.argsort({d}), {d}); {a}.scatter({d}, {a}.argsort({d}), {a} * {x});
        torch.where({a} > {a}.mean(), {a}, -{a})""",
    "random": """
        F.dropout({a}, 0.4); F.dropout({a}, 0.1); {a} + torch.randn_like({a}) * 0.1; {a} * torch.rand(());
        F.rrelu({a}, training=True); F.dropout1d({a}, 0.5); F.alpha_dropout({a}, 0.3);
        {a} * torch.bernoulli(torch.full_like({a}, 0.7)); {a}[torch.randperm(len({a}))]""",
    "pooling": """
        F.max_pool2d({a}, 2); F.avg_pool2d({a}, 2); F.adaptive_avg_pool2d({a}, 1); F.max_pool1d({a}, 2);
        F.avg_pool1d({a}, 2); F.max_pool2d({a}, 3, 1, 1); F.adaptive_max_pool2d({a}, 2); F.avg_pool2d({a}, 3, 1, 1);
        F.interpolate({a}, scale_factor=2); F.interpolate({a}, size=(3, 3), mode="bilinear");
        F.pixel_unshuffle({a}, 2); F.unfold({a}, 2); F.pad({a}, (1, 1, 1, 1), mode="reflect")""",
    "cast": """
        {a}.double(); {a}.float(); {a}.bfloat16(); {a}.to({b}.dtype); {a}.detach(); {a} * {b}.detach();
        ({a} > 0).to({a}.dtype) * {b}; {a}.float() @ {b}.float().mT""",
    "in place": """
        {w}.add_({b}); {w}.sub_({b}); {w}.mul_({x}); {w}.mul_({b}); {w}.relu_(); {w}.sigmoid_(); {w}.tanh_();
        {w}.clamp_(-1, 1); {w}[{k}] = {b}; {w}[..., 1:] *= {x}; {w}[{k}].add_({b}); {w}.transpose(0, 1).add_({b});
        {w}.masked_fill_({w} > 0, 0.5); {w}.copy_({b}); {w}[:, {k}].copy_({b}); {w}.div_({x}); {w}[{k}].zero_();
        F.relu({w}, inplace=True); F.dropout({w}, 0.3, inplace=True); {w}.addcmul_({b}, {c}); {w}[{b} > 0] = {x};
        {w}.view(-1)[1:].mul_({x}); {w}.index_add_(0, torch.arange(2), {b}); {w}.diagonal().fill_({x}); {w}.exp_();
        {w}[..., ::2].sigmoid_(); {w}[:, 1:] = {b}""",
}  # fmt: skip
TEMPLATES = {family: tuple(item.strip() for item in text.split(";")) for family, text in FAMILIES.items()}
WEIGHTS = {"unary": 3, "binary": 4, "matrix": 2, "view": 3, "in place": 3}


@dataclass(frozen=True, eq=False)
class RandomProgram:
    """A scalar function of `inputs`, to be differentiated by those at `wanted`; some of them may not matter."""

    seed: int
    listing: str
    function: Callable[..., torch.Tensor]
    inputs: tuple[torch.Tensor, ...]
    wanted: tuple[int, ...]
    templates: tuple[str, ...]  # of the statements, in order
    num_uses: dict[str, int]  # by value

    def __str__(self) -> str:
        kinds = [f"x{i}: {str(x.dtype)[6:]}{list(x.shape)} in strides {x.stride()}" for i, x in enumerate(self.inputs)]
        return f"program {self.seed} by {self.wanted} of {', '.join(kinds)}\n{self.listing}"

    def run_eagerly(self) -> tuple[torch.Tensor, tuple[torch.Tensor | None, ...]]:
        """The value and autograd's gradients."""
        inputs = [x.detach().requires_grad_(index in self.wanted) for index, x in enumerate(self.inputs)]
        loss = self.function(*inputs)
        return loss.detach(), torch.autograd.grad(loss, [inputs[index] for index in self.wanted], allow_unused=True)


def make_program(seed: int) -> RandomProgram:
    """The program of a seed, the same on every call; PyTorch's global generator is left alone."""
    for attempt in itertools.count():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            program = _Builder(random.Random(f"{seed}/{attempt}")).build(seed)
            try:
                program.run_eagerly()
            except RuntimeError:
                continue  # eager has no backward pass for it: some kernels exist in bfloat16 for the forward pass only
            return program


class _Builder:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.scope: dict[str, Any] = {"torch": torch, "F": F}
        self.names: list[str] = []
        self.lines: list[str] = []
        self.templates: list[str] = []
        self.num_uses: dict[str, int] = {}
        # Memory that a backward pass would read; kept, so that no other takes its place.
        self.saved: dict[int, Any] = {}

    def build(self, seed: int) -> RandomProgram:
        inputs = tuple(self._make_input() for _ in range(self.chance.randint(3, 6)))
        wanted = tuple(index for index in range(len(inputs)) if index < 2 or self.chance.random() < 0.7)
        for index, tensor in enumerate(inputs):
            self._add(f"x{index}", tensor.clone().requires_grad_(index in wanted))
            _note_memory(self.saved, self.scope[f"x{index}"])
        num_statements = 10 + int(31 * self.chance.random() ** 3)
        save = partial(_note_memory, self.saved)  # autograd's graph keeps the hook, which must not keep the graph
        with torch.autograd.graph.saved_tensors_hooks(save, lambda nothing: nothing):
            while len(self.lines) < num_statements:
                self._add_statement()
        arguments = ", ".join(f"x{index}" for index in range(len(inputs)))
        body = "\n".join(f"    {line}" for line in [*self.lines, f"return {self._loss()}"])
        listing = f"def program({arguments}):\n{body}\n"
        space: dict[str, Any] = {"torch": torch, "F": F}
        exec(compile(listing, f"random_program_{seed}.py", "exec"), space)
        return RandomProgram(
            seed, listing, space["program"], inputs, wanted, tuple(self.templates), dict(self.num_uses)
        )

    def _make_input(self) -> torch.Tensor:
        tensor = torch.randn(self.chance.choice(SHAPES), dtype=torch.float64).to(self.chance.choice(DTYPES))
        return tensor.mT.contiguous().mT if tensor.dim() > 1 and self.chance.random() < 0.3 else tensor

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        self.scope[name] = tensor
        self.names.append(name)
        self.num_uses[name] = 0

    def _add_statement(self) -> None:
        families = list(TEMPLATES)
        family = self.chance.choices(families, [WEIGHTS.get(name, 1) for name in families])[0]
        template = self.chance.choice(TEMPLATES[family])
        for _ in range(MAX_TRIES):
            operands = self._operands(template)
            if operands is None:
                return
            used, line = operands
            if family == "in place" and len({_memory(self.scope[name]) for name in used}) < len(used):
                continue  # what a write reads of the memory it changes could not be saved
            try:
                accepted = self._run_write(line) if family == "in place" else self._run_expression(line)
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
                accepted = False  # eager PyTorch does not know this operation on these operands
            if accepted:
                self.templates.append(template)
                for name in used:
                    self.num_uses[name] += 1
                return

    def _operands(self, template: str) -> tuple[list[str], str] | None:
        """The values a statement uses and its text; None where there is no memory to write to."""
        fields = {
            "d": self.chance.randint(-2, 2),
            "k": self.chance.randint(0, 1),
            "x": self.chance.choice((0.5, 1.25, 2)),
        }
        used = []
        for field in dict.fromkeys(re.findall(r"{([abcstw])}", template)):
            if field == "w":
                writable = [name for name in self.names if self._can_be_written(name)]
                if not writable:
                    return None
                name = self.chance.choice(writable)
            else:
                name = self._pick()
            used.append(name)
            first = self.scope[used[0]]
            must_cast = field in "st" and self.scope[name].dtype != first.dtype
            fields[field] = f"{name}.to({first.dtype})" if must_cast else name
        return used, template.format(**fields)

    def _pick(self) -> str:
        """Any value; the newest three as often as all others together, so that programs grow long as well as wide."""
        return self.chance.choice(self.names[-3:] if self.chance.random() < 0.5 else self.names)

    def _can_be_written(self, name: str) -> bool:
        tensor = self.scope[name]
        return _memory(tensor) not in self.saved and not _overlaps(tensor)

    def _run_write(self, line: str) -> bool:
        exec(line, self.scope)
        self.lines.append(line)
        return True

    def _run_expression(self, line: str) -> bool:
        result = eval(line, self.scope)
        tensors = list(result) if isinstance(result, tuple | list) else [result]
        if not all(map(_is_tame, tensors)):
            return False
        names = [f"v{len(self.names) + offset}" for offset in range(len(tensors))]
        self.lines.append(f"{', '.join(names)}{'' if result is tensors[0] or len(tensors) > 1 else ','} = {line}")
        for name, tensor in zip(names, tensors, strict=True):
            self._add(name, tensor)
            if len(tensors) > 1:
                _note_memory(self.saved, tensor)  # PyTorch forbids writes where one operation made several views
        return True

    def _loss(self) -> str:
        """A sum over several values that carry a gradient, the unused ones first."""
        carriers = [name for name in self.names if self.scope[name].requires_grad]
        self.chance.shuffle(carriers)
        carriers.sort(key=lambda name: self.num_uses[name] > 0)
        terms = [
            self.chance.choice(("{}.sum()", "{}.mean()", "({0} * {0}).sum()")).format(name)
            for name in carriers[: self.chance.randint(2, 5)]
        ]
        return " + ".join(terms)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements share a place, so that a write has no defined result."""
    places = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    return places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).unique().numel() < tensor.numel()


def _note_memory(known: dict[int, Any], tensor: torch.Tensor) -> None:
    known[_memory(tensor)] = tensor.untyped_storage()


def _is_tame(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or not 0 < tensor.numel() <= MAX_ELEMENTS:
        return False
    return bool(tensor.detach().abs().max() < MAX_MAGNITUDE)
