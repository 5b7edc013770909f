"""Explores the protocol of the parameter server: all orders in which messages may arrive, processes end, and time pass.

The machines are those that run with Ray (`undertow.server`). Only the network, the clock, the tensors and the workers
are made up here. A part's tensors are the list of what was applied to them. A message that was sent may arrive at any
later moment, in any order, twice as long as `num_twice` lasts, or never. A process that is stopped is one to which
nothing arrives and which does nothing until it goes on, so stops and wake-ups are orders like any other.

States are explored once each. Everything in them has a number: states are then short tuples of numbers, and what a
machine does on a message is computed once. `violation` says what is wrong in a state; the way there is kept.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import permutations, product
from typing import Any

from undertow.server.controller import Controller
from undertow.server.messages import Accept, Ballot, Done, Leave, Membership, Obituary, Push, Refused
from undertow.server.replica import DROP, KEEP, TAKE, TENSORS, Apply, Load, Replica
from undertow.server.rules import Rules
from undertow.server.state import Fill, State

CONTROLLERS = ("c0", "c1", "c2")
ENDED = -1  # the state of a process that is killed


@dataclass(frozen=True)
class Case:
    """What may happen, and how often."""

    num_servers: int = 2
    num_members: int = 2
    num_workers: int = 2
    num_pushes: int = 2  # of all workers together
    max_delay: float = 1
    num_crashes: int = 1
    num_proposals: int = 1
    num_twice: int = 0
    num_resends: int = 1
    num_fills: int = 0
    num_given_up: int = 0  # workers that are given up though they go on
    last_time: int = 1
    lease_s: int = 1
    crashing: tuple[str, ...] = ()  # who may be killed; by default all servers
    has_slow_answers: bool = False  # controllers' answers are messages of their own; else they arrive at once
    replica: type[Replica] = Replica
    controller: type[Controller] = Controller


@dataclass(frozen=True, slots=True)
class Counts:
    """What has happened so far."""

    next_number: int = 0
    returned: tuple[int, ...] = ()  # numbers of workers that were given up
    crashes: int = 0
    proposals: int = 0
    twice: int = 0
    resends: int = 0
    fills: int = 0
    given_up: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What nobody in the system sees as a whole: what workers were shown, and which memberships were chosen."""

    shown: tuple[Any, ...] = ()  # the longest content that a worker was shown
    is_taken_back: bool = False  # whether two that were shown contradict each other
    accepts: frozenset[tuple[Ballot, str, Membership]] = frozenset()
    chosen: Membership = Membership(1, ("s0",))


@dataclass(slots=True)
class Worker:
    """A worker as the model has it: it takes a number, pushes to one server or another, and hears that it is done.

    With a delay of 0 it may take several numbers of one update, so another worker may take none.
    """

    name: str
    numbers: tuple[int, ...] = ()  # pushed and not answered
    version: int = 0  # that it holds
    is_out: bool = False

    def receive(self, message: Any, now: float) -> list[tuple[str, Any]]:
        if isinstance(message, Done) and message.number in self.numbers:
            self.numbers = tuple(number for number in self.numbers if number != message.number)
            self.version = max(self.version, message.version)
        if isinstance(message, Refused):
            self.is_out = True
        return []


# Numbers of: each machine's state, each server's content, the messages on their way, the time, Counts, Seen.
World = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int, int]


class Model:
    """The machines of a case, and the steps from one world to the next."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rules = Rules(CONTROLLERS, case.max_delay, case.num_workers, case.lease_s)
        self.servers = tuple(f"s{index}" for index in range(case.num_servers))
        self.workers = tuple(f"w{index}" for index in range(case.num_workers))
        self.names = (*CONTROLLERS, *self.servers, *self.workers)
        self.place = {name: index for index, name in enumerate(self.names)}
        self._numbers: dict[Any, int] = {}
        self._things: list[Any] = []
        self._steps: dict[Any, Any] = {}
        self._calls: dict[Any, Any] = {}
        self._wrong: dict[Any, str] = {}
        self._serving: dict[Any, bool] = {}
        self._orders = [dict(zip(CONTROLLERS, order, strict=True)) for order in permutations(CONTROLLERS)]
        self._renames: list[dict[int, int]] = [{} for _ in self._orders]

    def number(self, thing: Any) -> int:
        """The number of a thing; equal things have one number."""
        found = self._numbers.get(thing)
        if found is None:
            found = self._numbers[thing] = len(self._things)
            self._things.append(thing)
        return found

    def freeze(self, machine: Any) -> int:
        return self.number(tuple(getattr(machine, item.name) for item in fields(machine)))

    def thaw(self, number: int) -> Any:
        values = self._things[number]
        machine = copy.copy(self._patterns[self.place[values[0]]])
        for item, value in zip(fields(machine), values, strict=True):
            setattr(machine, item.name, value)
        return machine

    def start(self) -> World:
        """All have joined, and the primary has its lease."""
        case = self.case
        membership = Membership(1, self.servers[: case.num_members])
        state = State(holding=tuple((name, 0) for name in self.workers))
        machines: list[Any] = [
            case.controller(name, self.rules, membership, leased_until=case.lease_s) for name in CONTROLLERS
        ]
        for name in self.servers:
            is_member = name in membership.members
            known = {"membership": membership, "state": state, "is_filled": True} if is_member else {}
            machines.append(case.replica(name, 0, self.rules, **known))
        machines[self.place["s0"]].lease_until, machines[self.place["s0"]].asked_at = case.lease_s, 0
        machines += [Worker(name) for name in self.workers]
        self._patterns = machines  # each has a name as its first field, which tells them apart
        empty = (self.number(()),) * len(self.servers)
        frozen = tuple(map(self.freeze, machines))
        return frozen, empty, (), 0, self.number(Counts()), self.number(Seen(chosen=membership))

    def next_worlds(self, world: World) -> Iterator[tuple[Any, World]]:
        """Everything that can happen now, with what comes of it."""
        case, (machines, contents, network, now, counted, seen) = self.case, world
        counts: Counts = self._things[counted]
        last = -1
        for index, item in enumerate(network):
            if item == last:
                continue
            last = item
            to, message, tensors = self._things[item]
            if machines[self.place[to]] == ENDED:
                continue
            after = self._act(world, to, ("receive", message, now), tensors, network[:index] + network[index + 1 :])
            yield ("arrives", to, message), after
            if counts.twice < case.num_twice:
                after = self._act(world, to, ("receive", message, now), tensors, network)
                yield (
                    ("arrives, not for the last time", to, message),
                    self._count(after, counts, twice=counts.twice + 1),
                )
        if now < case.last_time:
            yield "time passes", (machines, contents, network, now + 1, counted, seen)
        yield from self._worker_steps(world, counts)
        yield from self._server_steps(world, counts)
        if counts.crashes < case.num_crashes:
            yield from self._crashes(world, counts)

    def _count(self, world: World, counts: Counts, **changes: Any) -> World:
        return (*world[:4], self.number(replace(counts, **changes)), world[5])

    def _with_sent(self, world: World, messages: Sequence[Any]) -> World:
        network = sorted((*world[2], *map(self.number, messages)))
        return (*world[:2], tuple(network), *world[3:])

    def _act(self, world: World, name: str, call: Any, tensors: Any, network: tuple[int, ...]) -> World:
        """Let one machine act."""
        machines, contents, _, now, counted, seen = world
        place = self.place[name]
        is_server = name in self.servers
        content = contents[self.servers.index(name)] if is_server else 0
        # What a machine does depends on itself and on what it is told, so each of its steps is computed once.
        key = (machines[place], call, content, tensors)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = self._compute(machines[place], call, content, tensors)
        after, content, sent, shown = found
        machines = (*machines[:place], after, *machines[place + 1 :])
        if is_server:
            index = self.servers.index(name)
            contents = (*contents[:index], content, *contents[index + 1 :])
        for item in shown:
            seen = self._show(seen, item)
        if isinstance(call[1], Accept) and name in CONTROLLERS:
            seen = self._note_accept(seen, self._things[after], name, call[1])
        if name in CONTROLLERS and not self.case.has_slow_answers:
            after = machines, contents, network, now, counted, seen
            for item in sent:
                to, message, _ = self._things[item]
                if after[0][self.place[to]] != ENDED:
                    after = self._act(after, to, ("receive", message, now), None, after[2])
            return after
        return machines, contents, tuple(sorted((*network, *sent))), now, counted, seen

    def _compute(self, number: int, call: Any, content: int, tensors: Any) -> Any:
        machine = self.thaw(number)
        is_server = isinstance(machine, Replica)
        sent, shown = [], []
        for to, message in getattr(machine, call[0])(*call[1:]):
            if to == TENSORS:
                content = self._change(content, message, tensors)
                continue
            beside = content if is_server and isinstance(message, Fill) else None
            if isinstance(message, Done):
                shown.append(content)
            sent.append(self.number((to, message, beside)))
        return self.freeze(machine), content, tuple(sent), tuple(shown)

    def _change(self, content: int, what: Any, tensors: Any) -> int:
        if isinstance(what, Load):
            return tensors
        assert isinstance(what, Apply)
        if not what.entry.pushes:
            return content
        updates = self._things[content]
        applied = tuple((push.number, len(updates) - push.versions[0]) for push in what.entry.pushes)
        return self.number((*updates, applied))

    def _show(self, seen: int, content: int) -> int:
        before: Seen = self._things[seen]
        shorter, longer = sorted((before.shown, self._things[content]), key=len)
        is_taken_back = before.is_taken_back or longer[: len(shorter)] != shorter
        return self.number(replace(before, shown=longer, is_taken_back=is_taken_back))

    def _note_accept(self, seen: int, frozen: Any, name: str, message: Accept) -> int:
        controller = dict(zip((item.name for item in fields(Controller)), frozen, strict=True))
        before: Seen = self._things[seen]
        if controller["accepted"] != message.ballot:
            return seen
        accepts = before.accepts | {(message.ballot, name, message.membership)}
        num_accepts = sum(item[0] == message.ballot for item in accepts)
        is_chosen = num_accepts >= 2 and message.membership.epoch > before.chosen.epoch
        return self.number(replace(before, accepts=accepts, chosen=message.membership if is_chosen else before.chosen))

    def _worker_steps(self, world: World, counts: Counts) -> Iterator[tuple[Any, World]]:
        case, machines = self.case, world[0]
        for name in self.workers:
            place = self.place[name]
            _, numbers, version, is_out = self._things[machines[place]]
            if is_out:
                continue
            taken = -1
            if counts.returned or counts.next_number < case.num_pushes:
                taken = counts.returned[0] if counts.returned else counts.next_number
            if taken >= 0 and self._may_take(numbers, taken):
                rest = {"returned": counts.returned[1:]} if counts.returned else {"next_number": counts.next_number + 1}
                frozen = self.number((name, (*numbers, taken), version, is_out))
                after = ((*machines[:place], frozen, *machines[place + 1 :]), *world[1:])
                after = self._with_sent(after, [("s0", Push(name, taken, (version,)), None)])
                yield (name, "pushes", taken), self._count(after, counts, **rest)
            if counts.resends < case.num_resends:
                for number, server in product(numbers, self.servers):
                    after = self._with_sent(world, [(server, Push(name, number, (version,)), None)])
                    yield (
                        (name, "pushes again", number, server),
                        self._count(after, counts, resends=counts.resends + 1),
                    )
            if case.max_delay == 0 and not numbers:
                yield from self._pulls(world, name, version)
            if counts.given_up < case.num_given_up:
                returned = (*counts.returned, *numbers)
                after = self._with_sent(world, [(server, Leave(name), None) for server in self.servers])
                changes = {"given_up": counts.given_up + 1, "returned": returned}
                yield (name, "is given up"), self._count(after, counts, **changes)

    def _may_take(self, numbers: tuple[int, ...], taken: int) -> bool:
        if self.case.max_delay > 0:
            return not numbers
        return all(self.rules.update_of(number) == self.rules.update_of(taken) for number in numbers)

    def _pulls(self, world: World, name: str, version: int) -> Iterator[tuple[Any, World]]:
        """What a primary has, though its worker has pushed nothing for it."""
        machines, now = world[0], world[3]
        for server in self.servers:
            number = machines[self.place[server]]
            if number == ENDED:
                continue
            replica = self.thaw(number)
            if replica.is_serving(now) and replica.state.version > version:
                place = self.place[name]
                frozen = self.number((name, (), replica.state.version, False))
                after = ((*machines[:place], frozen, *machines[place + 1 :]), *world[1:])
                yield (name, "pulls from", server), after

    def _server_steps(self, world: World, counts: Counts) -> Iterator[tuple[Any, World]]:
        case, machines, now = self.case, world[0], world[3]
        for name in self.servers:
            number = machines[self.place[name]]
            if number == ENDED:
                continue
            key = number, now
            if key not in self._calls:
                self._calls[key] = self._find_calls(self.thaw(number), now)
            for call in self._calls[key]:
                if call[0] == "propose" and counts.proposals == case.num_proposals:
                    continue
                if call[0] == "fill" and counts.fills == case.num_fills:
                    continue
                after = self._act(world, name, call, None, world[2])
                changes = {
                    "proposals": counts.proposals + (call[0] == "propose"),
                    "fills": counts.fills + (call[0] == "fill"),
                }
                yield (name, *call), self._count(after, counts, **changes)

    def _find_calls(self, replica: Replica, now: int) -> list[Any]:
        """What a server may do by itself."""
        calls: list[Any] = []
        if replica.is_primary and replica.asked_at < now:
            calls.append(("renew", now))
        if replica.is_member and replica.proposal is None and replica.membership is not None:
            if not replica.is_primary:
                calls.append(("propose", TAKE, replica.name, now))
            else:
                calls += [("propose", DROP, other, now) for other in replica.membership.members[1:]]
                if replica.lease_until <= now:
                    calls.append(("propose", KEEP, replica.name, now))
        if replica.is_primary and replica.membership is not None:
            calls += [("fill", name) for name in self.servers if name not in replica.membership.members]
        return calls

    def _crashes(self, world: World, counts: Counts) -> Iterator[tuple[Any, World]]:
        machines = world[0]
        for name in self.case.crashing or self.servers:
            place = self.place[name]
            if machines[place] == ENDED:
                continue
            after = ((*machines[:place], ENDED, *machines[place + 1 :]), *world[1:])
            if name in self.servers:
                after = self._with_sent(after, [(item, Obituary(name), None) for item in CONTROLLERS])
            yield (name, "is killed"), self._count(after, counts, crashes=counts.crashes + 1)

    def canonical(self, world: World) -> World:
        """The same world with the controllers in another order: which of them is which makes no difference."""
        return min(self._renamed(world, order) for order in range(len(self._orders)))

    def _renamed(self, world: World, order: int) -> World:
        machines, contents, network, now, counted, seen = world
        names = self._renames[order]

        def new(number: int) -> int:
            if number == ENDED:
                return ENDED
            found = names.get(number)
            if found is None:
                found = names[number] = self.number(_rename(self._things[number], self._orders[order]))
            return found

        moved = [ENDED] * len(CONTROLLERS)
        for place, to in enumerate(self._orders[order].values()):
            moved[self.place[to]] = new(machines[place])
        others = map(new, machines[len(CONTROLLERS) :])
        return (*moved, *others), contents, tuple(sorted(map(new, network))), now, counted, new(seen)

    def violation(self, world: World) -> str:
        """What is wrong in this state; empty if nothing is."""
        machines, contents, _, now, _, seen = world
        num_serving = 0
        for name in self.servers:
            number = machines[self.place[name]]
            if number == ENDED:
                continue
            if (number, now) not in self._serving:
                self._serving[number, now] = self.thaw(number).is_serving(now)
            num_serving += self._serving[number, now]
        if num_serving > 1:
            return "two primaries take pushes"
        alive = tuple(name for name in self.servers if machines[self.place[name]] != ENDED)
        key = contents, seen, alive
        if key not in self._wrong:
            self._wrong[key] = self._find_wrong([self._things[item] for item in contents], self._things[seen], alive)
        return self._wrong[key]

    def _find_wrong(self, contents: list[Any], seen: Seen, alive: tuple[str, ...]) -> str:
        if seen.is_taken_back:
            return "what a worker was shown is taken back"
        for content in contents:
            numbers = [number for update in content for number, _ in update]
            if len(numbers) != len(set(numbers)):
                return "a push is applied twice"
            if any(staleness > self.case.max_delay for update in content for _, staleness in update):
                return "a push is too stale"
        members = [contents[self.servers.index(name)] for name in seen.chosen.members if name in alive]
        if any(content[: len(seen.shown)] != seen.shown for content in members):
            return "an answered push is lost at a member"
        ordered = sorted(members, key=len)
        if any(longer[: len(shorter)] != shorter for shorter, longer in zip(ordered, ordered[1:], strict=False)):
            return "two members differ"
        return ""


@dataclass
class Found:
    """What an exploration has found."""

    num_states: int
    depth: int  # to which all states were seen
    is_complete: bool  # nothing was left out
    violation: str = ""
    way: tuple[Any, ...] = ()  # what happened, from the start to the violation


def explore(case: Case, depth: int = 1000) -> Found:
    """See every state within `depth` steps, those that take fewer first, until there is none left."""
    model = Model(case)
    start = model.start()
    came_from: dict[World, Any] = {start: None}
    level, reached = [start], 0
    while level and reached < depth:
        following = []
        for world in level:
            for event, after in model.next_worlds(world):
                after = model.canonical(after)
                if after in came_from:
                    continue
                came_from[after] = world, event
                if violation := model.violation(after):
                    return Found(len(came_from), reached, False, violation, _trace(came_from, after))
                following.append(after)
        level, reached = following, reached + 1
    return Found(len(came_from), reached, not level)


def walk(case: Case, num_steps: int, seed: int) -> Found:
    """Follow random ways to their ends, which lie deeper than all states can be seen."""
    model, draw = Model(case), random.Random(seed)
    num_states, deepest = 0, 0
    while num_states < num_steps:
        world, way = model.start(), []
        while options := list(model.next_worlds(world)):
            event, world = draw.choice(options)
            way.append(event)
            num_states += 1
            if violation := model.violation(world):
                return Found(num_states, len(way), False, violation, tuple(way))
        deepest = max(deepest, len(way))
    return Found(num_states, deepest, False)


def _rename(thing: Any, names: Mapping[str, str]) -> Any:
    """The same thing about controllers of other names."""
    if isinstance(thing, str):
        return names.get(thing, thing)
    if isinstance(thing, tuple):
        return tuple(_rename(item, names) for item in thing)
    if isinstance(thing, frozenset):
        return frozenset(_rename(item, names) for item in thing)
    if is_dataclass(thing) and not isinstance(thing, Rules):
        return replace(thing, **{item.name: _rename(getattr(thing, item.name), names) for item in fields(thing)})
    return thing


def _trace(came_from: dict[World, Any], world: World) -> tuple[Any, ...]:
    way = []
    while came_from[world] is not None:
        world, event = came_from[world]
        way.append(event)
    return tuple(reversed(way))
