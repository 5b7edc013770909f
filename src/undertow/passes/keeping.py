"""`find_kept`: what the forward pass keeps for the backward pass, when elementwise operations cost nothing to repeat.

In: an expanded Program. Out: the values to keep, with the fewest bytes in total, from which every value that the
backward pass reads follows by elementwise operations and views. They are a minimum cut: each value is an edge from its
maker to its readers, with its bytes as capacity. Instead of the output of an elementwise operation, its inputs may be
cut. Inputs of the Program are there anyway. After Chen et al. 2016 and the partitioner of PyTorch's AOTAutograd.

A value that one group makes and another reads is written to memory in any case, and read from there: otherwise a sum
along all layers would be repeated from its beginning. A value that products of both passes read is kept: making it
again would take a pass over memory of its own, and the planner decides about that.
"""

from __future__ import annotations

import numpy
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from undertow.fast.groups import is_free
from undertow.ir import Program, Value

# Capacities are 32-bit: bytes are counted in units of the largest sum over this.
MOST = 2**30


def find_kept(program: Program, passed_on: set[Value], in_demand: set[Value]) -> set[Value]:
    """The values to keep in addition to `in_demand`; `passed_on` are written to memory in any case."""
    made = {value: node for node in program.first_pass for value in node.named_outputs if value not in in_demand}
    needed = {value for node in program.second_pass for value in node.inputs if value in made}
    numbers = {value: number for number, value in enumerate(made)}
    source, sink = 2 * len(made), 2 * len(made) + 1
    total = sum(value.type.num_bytes for value in made) or 1
    unit = max(1, total // MOST + 1)
    edges: dict[tuple[int, int], int] = {}
    for value, node in made.items():
        entry, leave = 2 * numbers[value], 2 * numbers[value] + 1
        is_shared = node.operation.is_view
        edges[entry, leave] = MOST if is_shared else -(-value.type.num_bytes // unit)
        if is_free(node) and value not in passed_on:
            for read in node.inputs:
                if read in numbers:
                    edges[2 * numbers[read] + 1, entry] = MOST
        else:
            edges[source, entry] = MOST
        if value in needed:
            edges[leave, sink] = MOST
    places = numpy.array(list(edges), numpy.int64).reshape(-1, 2)
    capacity = csr_array(
        (numpy.array(list(edges.values()), numpy.int32), (places[:, 0], places[:, 1])), shape=(sink + 1, sink + 1)
    )
    flow = maximum_flow(capacity, source, sink).flow
    rest = csr_array(capacity - flow)
    rest.eliminate_zeros()
    reached = numpy.zeros(sink + 1, bool)
    reached[breadth_first_order(rest, source, return_predecessors=False)] = True
    return {value for value in made if reached[2 * numbers[value]] and not reached[2 * numbers[value] + 1]}
