"""From a derived Program to the Plan that fits a budget.

In: a Program, the cost of its operations and of their alternatives, the held bytes, a budget. Out: a Plan, rebuilt from
the fastest schedule on the curve that fits, with a proved lower bound on the time of any schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from undertow.alternatives.registry import Alternative
from undertow.ir import Node, Outcome, Plan, Program
from undertow.ir.cost import Cost
from undertow.memory.tables import make_plan
from undertow.planner.bounds import lower_bound_time
from undertow.planner.curve import Curve, find_curve
from undertow.planner.lane_bound import bound_of_links
from undertow.planner.problem import Problem, make_problem
from undertow.planner.rebuild import rebuild
from undertow.planner.search import Solution

PROVED = 1e-4  # a smaller gap counts as none: durations are measured no better


@dataclass(frozen=True, eq=False)
class Planner:
    """A step with its curve, ready to be planned for any budget."""

    problem: Problem
    curve: Curve
    cost_of: Callable[[Node], Cost]
    held: Mapping[str, int]
    has_measured_costs: bool

    def plan_within(self, budget_bytes: int | None) -> Plan | None:
        """The fastest plan found that fits; None if none does. Without a budget, the fastest of all."""
        most_bytes = budget_bytes + self.problem.overcounted_bytes if budget_bytes is not None else 2**62
        for point in self.curve.within(most_bytes):
            plan = self.realise(point, budget_bytes)
            # What runs may need more bytes than the search counted. The next point is slower and smaller.
            if budget_bytes is None or plan.peak_bytes <= budget_bytes:
                return self.with_bound(plan)
        return None

    @cached_property
    def smallest(self) -> Plan:
        """The plan of the least peak; the same for every budget."""
        plan = min((self.realise(point, None) for point in self.curve.points[:3]), key=lambda plan: plan.peak_bytes)
        while (smaller := self.plan_within(plan.peak_bytes - 1)) is not None:
            plan = smaller
        return plan

    def realise(self, point: Solution, budget_bytes: int | None) -> Plan:
        """The Plan that runs a point of the curve."""
        rebuilt = rebuild(self.problem, point.schedule.tolist())
        return make_plan(
            rebuilt.program,
            base=self.problem.program,
            bases=rebuilt.bases,
            repeats=rebuilt.repeats,
            cost_of=self.cost_of,
            held=self.held,
            budget_bytes=budget_bytes,
            has_measured_costs=self.has_measured_costs,
        )

    def with_bound(self, plan: Plan) -> Plan:
        """The plan with what is proved about it. The bound is a linear program, solved only for the chosen plan."""
        most_bytes = (plan.budget_bytes or plan.peak_bytes) + self.problem.overcounted_bytes
        durations = self.problem.instance.duration.copy()
        durations[list(self.problem.sent)] = 0  # of computing, beside which links go on
        computing = lower_bound_time(replace(self.problem.instance, duration=durations), most_bytes, False).amount
        bound = max(computing, bound_of_links(self.problem))
        outcome = Outcome.FEASIBLE if self.curve.is_complete else Outcome.TIMED_OUT
        if plan.times.step_ns <= bound * (1 + PROVED):
            outcome = Outcome.OPTIMAL
        if plan.budget_bytes is None:
            outcome = Outcome.UNCONSTRAINED
        return replace(plan, lower_bound_ns=bound, outcome=outcome)


def make_planner(
    program: Program,
    alternatives: Sequence[Alternative],
    cost_of: Callable[[Node], Cost],
    held: Mapping[str, int],
    *,
    has_measured_costs: bool,
    time_limit_s: float = math.inf,
) -> Planner:
    """Find the curve of a step."""
    problem = make_problem(program, alternatives, cost_of, sum(held.values()))
    curve = find_curve(problem.instance, time_limit_s=time_limit_s)
    curve = replace(curve, lower_bound_peak_bytes=curve.lower_bound_peak_bytes - problem.overcounted_bytes)
    return Planner(problem, curve, cost_of, held, has_measured_costs)
