"""An operation: one record that declares all that any stage needs to know of it, and the registry of these records.

A stage asks the record and guesses nothing. So a new operation (a collective, a projection after an update, a push to
a server) is one record, and planner, checker, runtime and printer do not change. PyTorch's own operations have records
too, made from what PyTorch says of them (`pytorch.py`).

Records are found by name. A maker is a function that makes records from plain parameters, such as
`replayed(operation, device)`. The registry knows the makers, and a record knows its maker and parameters. A file holds
nothing else of an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, ParamSpec

from undertow.errors import ProgramError
from undertow.torch_internals import OpOverload

if TYPE_CHECKING:
    from undertow.ir.cost import Cost
    from undertow.ir.program import Node
    from undertow.ir.values import Value

COMPUTING = "computing"  # the lane of whatever occupies the device that computes

# One chain for draws and guards: when a guard finds another value than was recorded, the draws before it are undone.
REVERSIBLE = "draws and guards"


def nothing(node: Node) -> tuple[Any, ...]:
    """The default of a record's function that lists something for a node."""
    return ()


def never(node: Node) -> bool:
    """The default of a record's function that answers yes or no for a node."""
    return False


def zero(node: Node) -> int:
    """The default of a record's function that gives a number for a node."""
    return 0


@dataclass(frozen=True, eq=False)
class Destination:
    """How an operation is told where to write: `call(*args, **kwargs, name=tensor)` with a name for each output.

    Without names all tensors are given as `out`, in a tuple. Where `takes_some`, None stands for a tensor that the
    operation makes itself. `fits` says whether a node can be called in this way.
    """

    call: Callable[..., Any]
    names: tuple[str, ...] | None = None
    takes_some: bool = False
    fits: Callable[[Node], bool] = lambda node: True


@dataclass(frozen=True, eq=False)
class Operation:
    """What a node runs. `run` takes the node's arguments and returns its outputs.

    The fields below are what stages ask, by subject. Their defaults describe a function of its arguments that makes
    new tensors, such as a kernel of our own.
    """

    name: str
    run: Callable[..., Any] = field(repr=False)
    maker: str = ""  # the maker and the parameters that it comes from: a file names it by them
    parameters: tuple[Any, ...] = field(default=(), repr=False)
    overload: OpOverload | None = field(default=None, repr=False)  # of an operation of PyTorch's own
    returns_tuple: bool = False

    # Memory.
    shares: int | None = None  # the input (0 is the first, -1 the last) in whose memory the outputs lie
    is_view: bool = False  # nothing is computed: another look at an argument
    writes: Callable[[Node], tuple[Value, ...]] = field(default=nothing, repr=False)  # the values it overwrites
    is_fresh: bool = False  # the outputs always lie in new memory, of their own size
    borrows: bool = False  # its opaque output (a context, a handle) uses the arguments until it is last read
    releases_arguments: bool = True  # holds no reference to an argument after it has returned
    hands_over: int | None = None  # the argument whose memory becomes the user's
    is_oversized: bool = False  # an output lies at the front of more memory than it needs
    find_destination: Callable[[], Destination | None] = field(default=lambda: None, repr=False)

    # Order and repetition.
    must_run: bool = False  # even if nobody reads its outputs
    chains: Callable[[Node], tuple[str, ...]] = field(default=nothing, repr=False)  # runs once, in their order
    is_random: bool = False  # a kernel that may draw; it gets the generator's state of its moment
    draws: Callable[[Node], bool] = field(default=never, repr=False)  # whether this call does
    is_guard: bool = False  # raises GuardMiss where a tensor holds another value than was recorded
    can_repeat: bool = True
    pauses: bool = False  # the step stops here until whoever runs it goes on
    droppable: tuple[int, ...] = ()  # arguments that a repeat leaves out: its first run alone updates them

    # Relatives.
    repeats: Operation | None = field(default=None, repr=False)  # run again here, under a recorded generator state
    functional_of: Operation | None = field(default=None, repr=False)  # made free of side effects here
    in_place: Operation | None = field(default=None, repr=False)  # that writes its result over the first argument
    derivative_of: Operation | None = field(default=None, repr=False)  # differentiated here by PyTorch, at run time
    gradient: Callable[..., Sequence[Any]] | None = field(default=None, repr=False)  # (args, *cts) -> a ct per argument
    shape_only: int | None = None  # the argument of which only the shape is read
    second_runs: Callable[[Node], Iterable[Node]] = field(default=nothing, repr=False)  # that make some outputs again
    is_preparation: bool = False  # brings weights into the form that another operation reads
    runs_user_code: bool = False

    compile: Callable[[], None] | None = field(default=None, repr=False)  # before it first runs

    # Lanes. What runs on a link is started by its node, and goes on while later nodes compute.
    lane: str = COMPUTING
    sent_bytes: Callable[[Node], int] = field(default=zero, repr=False)  # over a link, by the rank that sends most
    urgency: Callable[[Node], int] = field(default=zero, repr=False)  # the least goes first over a link
    announces: Callable[[Node], tuple[str, ...]] = field(default=nothing, repr=False)  # what its transfer brings
    awaits: Callable[[Node], tuple[str, ...]] = field(default=nothing, repr=False)  # also of a call before

    # Cost.
    costs_nothing: bool = False
    is_measurable: bool = True  # can be run by itself on made-up arguments
    needs_all_ranks: bool = False  # to be measured
    rehearse: Callable[..., Callable[[], Any]] | None = field(default=None, repr=False)  # (*args) -> what to time
    parts: Callable[[Node, Mapping[str, Any]], Parts] | None = field(default=None, repr=False)  # that cost what it does
    settings: str = ""  # what decides on kernels besides the arguments
    flops: Callable[..., int] | None = field(default=None, repr=False)  # (*args) -> of its products
    reads_elements: bool = True  # False: it reads only the shape of its arguments
    is_filled: bool = False  # its outputs do not depend on what its first argument holds
    is_gather: bool = False  # reads no more of a table than it returns
    is_empty: bool = False  # makes memory without content
    assumed_workspace: Callable[[Node], int] | None = field(default=None, repr=False)  # where nothing was measured

    # CUDA graphs.
    why_not_captured: Callable[[Node], str | None] = field(default=lambda node: None, repr=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def __str__(self) -> str:
        return self.name

    @property
    def key(self) -> Any:
        """What rules, passes and tables know it by: PyTorch's own operation, or the record itself."""
        return self.overload if self.overload is not None else self

    @cached_property
    def destination(self) -> Destination | None:
        """How it is told where to write; None where it cannot be. Looked up late, when the rules are registered."""
        return self.find_destination()

    @property
    def writes_over(self) -> bool:
        """Whether its result is written over an argument."""
        return self.shares is not None and self.writes is not nothing


@dataclass(frozen=True)
class Parts:
    """The cost of an operation as a function of the costs of some nodes."""

    nodes: Sequence[Node]
    combine: Callable[[Sequence[Cost]], Cost]


Parameters = ParamSpec("Parameters")
_MAKERS: dict[str, Callable[..., Operation]] = {}


def operation_maker(make: Callable[Parameters, Operation]) -> Callable[Parameters, Operation]:
    """Register a function that makes records. Equal parameters give the same record; they are plain data or records."""
    known: dict[Any, Operation] = {}
    name = make.__name__

    @wraps(make)
    def find(*parameters: Parameters.args, **named: Parameters.kwargs) -> Operation:
        if named:
            raise TypeError(f"{name}: parameters are given by position, because a file holds them as a list")
        key = _with_types(parameters)
        if key not in known:
            known[key] = replace(make(*parameters, **named), maker=name, parameters=parameters)
        return known[key]

    _add_maker(name, find)
    return find


def _with_types(item: Any) -> Any:
    """A key that tells 1, 1.0 and True apart."""
    return tuple(map(_with_types, item)) if isinstance(item, tuple) else (type(item), item)


def register_operation(operation: Operation) -> Operation:
    """Register a single record, under its name."""
    found = replace(operation, maker=operation.name)
    _add_maker(operation.name, lambda: found)
    return found


def _add_maker(name: str, make: Callable[..., Operation]) -> None:
    if name in _MAKERS:
        raise ValueError(f"there is a maker of operations named {name} already")
    _MAKERS[name] = make


def find_operation(maker: str, parameters: Sequence[Any]) -> Operation:
    """The record that `maker` makes from `parameters`; raises ProgramError if there is none."""
    if maker not in _MAKERS:
        raise ProgramError(f"there is no operation {maker!r} here; it comes from another version, or from other code")
    try:
        return _MAKERS[maker](*parameters)
    except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise ProgramError(f"the operation {maker!r} cannot be made from {parameters!r}: {error}") from error
