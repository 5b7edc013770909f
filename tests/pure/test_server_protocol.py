"""The protocol of the parameter server, explored: no state breaks a rule. Without one of its rules, some state does."""

from dataclasses import replace

import pytest
from server_model import Case, explore, walk

from undertow.server.controller import Controller
from undertow.server.messages import Membership, Promise
from undertow.server.replica import Proposal, Replica

# Three servers of which two or three are members, and all that can go wrong, several times.
EVERYTHING = Case(
    num_servers=3,
    num_members=2,
    num_pushes=5,
    num_crashes=2,
    num_proposals=4,
    num_twice=3,
    num_resends=6,
    num_fills=2,
    num_given_up=1,
    last_time=6,
    crashing=("s0", "s1", "s2", "c0"),
    has_slow_answers=True,
)
THREE_MEMBERS = replace(EVERYTHING, num_members=3)


def report(found):
    return "\n".join([found.violation, *map(str, found.way)])


# What is seen to the end, and what to a depth.
ONE_PUSH = Case(num_pushes=1, last_time=0)
SYNCHRONOUS = Case(num_pushes=4, num_proposals=0, num_crashes=0, max_delay=0, num_resends=0, last_time=0)
COMPLETE = {
    "a push, a proposal, a server that is killed": ONE_PUSH,
    "two pushes, one of them twice": Case(num_proposals=0, num_crashes=0, num_twice=1, num_resends=0, last_time=0),
    "synchronous": Case(num_proposals=0, num_crashes=1, max_delay=0, num_resends=1, last_time=0),
    "two updates, synchronous": replace(SYNCHRONOUS, num_twice=1),
}
BY_DEPTH = {
    "leases": (Case(num_pushes=1), 8),
    "a worker that is given up": (Case(num_given_up=1, num_proposals=0, num_crashes=0, last_time=0), 9),
    "a new backup": (Case(num_servers=3, num_fills=1, num_pushes=1, num_crashes=0, last_time=0), 9),
    "slow answers": (Case(num_pushes=1, last_time=0, has_slow_answers=True), 9),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_no_order_of_messages_breaks_a_rule(name):
    found = explore(COMPLETE[name])
    assert not found.violation, report(found)
    assert found.is_complete
    assert found.num_states > 500


@pytest.mark.parametrize("name", BY_DEPTH)
def test_no_short_way_breaks_a_rule(name):
    case, depth = BY_DEPTH[name]
    found = explore(case, depth)
    assert not found.violation, report(found)
    assert found.depth == depth


@pytest.mark.parametrize("case", [EVERYTHING, THREE_MEMBERS, replace(EVERYTHING, max_delay=0)])
def test_no_random_way_breaks_a_rule(case):
    found = walk(case, 15_000, seed=1)
    assert not found.violation, report(found)
    assert found.depth > 50


@pytest.mark.exhaustive
@pytest.mark.parametrize("depth", [13])
@pytest.mark.parametrize("name", BY_DEPTH)
def test_no_longer_way_breaks_a_rule(name, depth):
    found = explore(BY_DEPTH[name][0], depth)
    assert not found.violation, report(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("case", [EVERYTHING, THREE_MEMBERS, replace(EVERYTHING, max_delay=0)])
def test_no_random_way_of_many_breaks_a_rule(case, seed):
    found = walk(case, 200_000, seed)
    assert not found.violation, report(found)


# The same protocol without one of its rules. Each must be found.


class AnswersEarly(Replica):
    __slots__ = ()

    def _needed(self):
        return frozenset()


class IsNotFenced(Replica):
    __slots__ = ()

    def _is_current(self, membership, out):
        if self.membership is not None and membership.epoch < self.membership.epoch:
            self.membership = replace(self.membership, members=membership.members, epoch=membership.epoch)
            return True
        return Replica._is_current(self, membership, out)


class AppliesTwice(Replica):
    __slots__ = ()

    def _is_repeated(self, push):
        return False


class AppliesBothOfAPair(Replica):
    __slots__ = ()

    def _is_under_way(self, push):
        return False


class WaitsForNobody(Replica):
    __slots__ = ()

    def _choose(self):
        return self.waiting[:1]


class TakesAnyVersion(Replica):
    """With a delay of 0, a gradient by the parameters before the last update counts."""

    __slots__ = ()

    def _is_of_another_version(self, push):
        return False


class TakesOverFromOutside(Replica):
    """Whoever knows the part takes over, though the controllers say that it was left out."""

    __slots__ = ()

    def _change(self, current: Membership, proposal: Proposal):
        if proposal.kind == "take" and self.name not in current.members:
            return Membership(current.epoch + 1, (self.name,))
        return Replica._change(self, current, proposal)


class AnswersBeforeNewBackup(Replica):
    """A new backup counts only once it is decided that it is one."""

    __slots__ = ()

    def _needed(self):
        return frozenset({*self._epoch().members} - {self.name})


class AsksNobody(Replica):
    """A new primary does not ask the others how far they are."""

    __slots__ = ()

    def _begin_epoch(self, now, out):
        self.learner = ""
        self._next(now, out)


class TakesAnyPromise(Replica):
    """The first promise decides which membership is replaced."""

    __slots__ = ()

    def _promise(self, message: Promise, now, out):
        if self.proposal is not None and self.proposal.ballot == message.ballot and self.proposal.wanted is None:
            self.proposal = replace(self.proposal, promises=(message, replace(message, controller="another")))
        Replica._promise(self, message, now, out)


class IgnoresLeases(Controller):
    __slots__ = ()

    def _is_leased_to_other(self, server, now):
        return False


class RenewsForAll(Controller):
    """A lease grows although somebody else was promised to take over."""

    __slots__ = ()

    def _renew(self, message, now):
        promised, self.promised = self.promised, self.accepted
        try:
            return Controller._renew(self, message, now)
        finally:
            self.promised = promised


THREE_AND_TIME = Case(num_servers=3, num_members=3, num_resends=3, num_proposals=3, crashing=("s0",))
MUTANTS = {
    "answers before the backup has it": (AnswersEarly, ONE_PUSH),
    "no fencing": (IsNotFenced, Case(num_pushes=2, num_crashes=0, num_resends=1)),
    "no list of what is applied": (AppliesTwice, Case(num_crashes=0, num_proposals=0, num_given_up=1, last_time=0)),
    "no look at what is waiting": (AppliesBothOfAPair, Case(num_crashes=0, num_proposals=0, num_twice=1, last_time=0)),
    "no delay": (WaitsForNobody, Case(num_pushes=4, num_crashes=0, num_proposals=0, num_resends=0, last_time=0)),
    "no look at the version": (TakesAnyVersion, SYNCHRONOUS),
    "takeover from outside": (TakesOverFromOutside, Case(num_pushes=1, num_crashes=0, num_proposals=2)),
    "new backup too late": (AnswersBeforeNewBackup, EVERYTHING),
    "members are not asked": (AsksNobody, THREE_AND_TIME),
    "one promise decides": (TakesAnyPromise, Case(num_pushes=1, num_crashes=0, num_proposals=2)),
}
CONTROLLER_MUTANTS = {"no leases": IgnoresLeases, "leases grow after a promise": RenewsForAll}


def search(case):
    for seed in range(5):
        found = walk(case, 40_000, seed)
        if found.violation:
            break
    return found


@pytest.mark.parametrize("name", MUTANTS)
def test_a_replica_without_a_rule_is_found(name):
    mutant, case = MUTANTS[name]
    found = search(replace(case, replica=mutant))
    assert found.violation


@pytest.mark.parametrize("name", CONTROLLER_MUTANTS)
def test_a_controller_without_a_rule_is_found(name):
    case = Case(num_pushes=1, num_crashes=0, last_time=2, has_slow_answers=True)
    found = search(replace(case, controller=CONTROLLER_MUTANTS[name]))
    assert found.violation == "two primaries take pushes"
