"""Simulated annealing over schedules, for Numba: the loop that draws moves, and accepts them or takes them back.

In: a schedule under edit (see `sequence`), a number of moves, temperatures. Out: the fastest schedule met whose peak
fits the budget.

The cost is time + price * summed excess over the budget. The price rises while the schedule does not fit and falls
while it does, so the search walks along the border of the feasible schedules from both sides (strategic oscillation).
The price starts low, so the first runs to be repeated are those that free most excess per time: annealing begins with
what a greedy construction would give.

Deterministic for a given seed: nothing here looks at a clock.
"""

from __future__ import annotations

import math

from undertow.kernels.compiler import cached_njit
from undertow.planner.moves import draw, draw_unit, drop_run, drop_useless, rerun_before, shift_run, switch_formulation
from undertow.planner.sequence import commit, roll_back, write_schedule
from undertow.planner.state import EXCESS, TIME

WINDOW = 100  # moves between two adjustments of the price
# Indices into the `record` of a search, which lasts across calls.
PRICE, BEST_TIME, BEST_RUNS = range(3)
NUM_RECORDS = 3


@cached_njit(nogil=True)
def anneal(state, best, record, weights, num_moves, hot, cold, price_step, goal_time):
    """Draw `num_moves` moves while the temperature falls geometrically; stop early at a schedule of `goal_time`."""
    cooling = (cold / hot) ** (1.0 / num_moves)
    temperature = hot
    fitting = 0
    drop_useless(state)
    if state[EXCESS] == 0 and state[TIME] < record[BEST_TIME]:
        record[BEST_TIME] = state[TIME]
        record[BEST_RUNS] = write_schedule(state, best)
        if record[BEST_TIME] <= goal_time:
            return
    for number in range(num_moves):
        temperature *= cooling
        time, excess, price = state[TIME], state[EXCESS], record[PRICE]
        # The largest change to accept is drawn first: a move that cannot stay below it gives up early.
        threshold = -temperature * math.log(draw_unit(state))
        choice = draw(state, weights[3])
        if choice < weights[0]:
            done = rerun_before(state, price, threshold)
        elif choice < weights[1]:
            done = drop_run(state)
        elif choice < weights[2]:
            done = shift_run(state)
        else:
            done = switch_formulation(state, price, threshold)
        change = state[TIME] - time + price * (state[EXCESS] - excess)
        if done and change <= threshold:
            commit(state)
            if state[EXCESS] == 0 and state[TIME] < record[BEST_TIME]:
                record[BEST_TIME] = state[TIME]
                record[BEST_RUNS] = write_schedule(state, best)
                if record[BEST_TIME] <= goal_time:
                    return
        else:
            roll_back(state)
        fitting += state[EXCESS] == 0
        if number % WINDOW == WINDOW - 1:
            if fitting > WINDOW // 2:
                record[PRICE] /= 1.0 + price_step
            elif fitting == 0:
                record[PRICE] *= 1.0 + price_step
            fitting = 0
