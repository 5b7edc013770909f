"""The parameter server with Ray on this machine: bits, faults, what listens. Each fault is shown to have fired."""

import os
import signal
import subprocess
import threading
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from served_model import SmallComputing, make_model, train_in_step

from undertow.errors import CallError, NotFinite
from undertow.server.cluster import running_cluster
from undertow.server.crashes import Fault
from undertow.server.job import JobDescription
from undertow.server.parts import cut, divide_parameters
from undertow.server.replay import Replay
from undertow.server.rules import Rules
from undertow.server.service import PartLost, Service, Size, new_namespace
from undertow.server.state import State
from undertow.server.tensors import PARAMETER, OptimizerSettings

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="the parameter server needs Ray: pip install 'undertow[cluster]'"
)
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "adam": partial(torch.optim.Adam, lr=0.01),
}
EXHAUSTIVE = pytest.mark.exhaustive
NUM_PARTS = 2
TWO_OF_EACH = Size(2, 2, 2)
IN_STEP = partial(SmallComputing, 0.5)  # two workers, whose losses count by halves


@pytest.fixture(scope="module")
def cluster():
    # Ray's processes import what they are given.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *([before] if before else [])])
    with running_cluster(None, 1 << 27, 4) as found:
        yield found
    os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


@pytest.fixture
def serve(cluster):
    """Starts a job; its processes end with the test."""
    started = []

    def start(make=SmallComputing, size=TWO_OF_EACH, optimizer="sgd", lost_after_s=60.0, dtype="f32", **rules):
        model = make_model()
        parameters = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        settings = OptimizerSettings.of(OPTIMIZERS[optimizer](model.parameters()), names)
        controllers = ("controller-0", "controller-1", "controller-2")
        parts = divide_parameters(parameters, NUM_PARTS)
        job = JobDescription(
            new_namespace(), Rules(controllers, round_size=size.workers, **rules), parts, settings, dtype
        )
        said = []
        service = Service(cluster, job, size, make, said.append, lost_after_s)
        service.said = said
        started.append(service)
        service.start([{PARAMETER: cut(parameters, part).numpy()} for part in parts], [State()] * NUM_PARTS)
        service.wait_for_workers()
        return service

    yield start
    for service in started:
        service.stop()


def train(service, numbers, during=None):
    """Train on these batches; `during` is called with how many are done."""
    done = []

    def note(result):
        done.append(result["number"])
        if during is not None:
            during(len(done))
        return True

    rate = service.job.optimizer.groups[0]["lr"]
    service.train(numbers, lambda number: (rate,), note)
    assert sorted(done) == list(numbers)
    return service.snapshot()


def expected(service, optimizer, num_updates, round_size):
    """What one process has after these updates, part by part."""
    model, made = train_in_step(OPTIMIZERS[optimizer], num_updates, round_size)
    parameters = dict(model.named_parameters())
    found = []
    for part in service.job.parts:
        values = {PARAMETER: cut(parameters, part)}
        for key, item in made.state[parameters["0.weight"]].items():
            if key == "step":
                values[key] = torch.tensor([float(item)] * len(part.pieces))
            else:
                values[key] = cut({name: made.state[tensor][key] for name, tensor in parameters.items()}, part)
        found.append(values)
    return found


def assert_same_bits(snapshots, wanted):
    for snapshot, values in zip(snapshots, wanted, strict=True):
        assert snapshot["values"].keys() == values.keys()
        for key, tensor in values.items():
            assert torch.equal(torch.from_numpy(snapshot["values"][key].copy()), tensor), key


def wait_until(is_true, service, seconds=40):
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end
        service._wait_for(service.courier.look(0))
        time.sleep(0.05)


def ask_all(actors, method):
    import ray

    return ray.get([getattr(actor, method).remote() for actor in actors.values()])


def assert_all_applied(service, num_batches, num_copies=2):
    """Every batch once, in every part, and the copies of each part have the same bits."""
    for part in range(NUM_PARTS):
        numbers = [push.number for _, pushes in service.read_log(part, 0) for push in pushes]
        assert sorted(numbers) == list(range(num_batches))
    # Whoever comes or goes is an entry too, which members have a moment after one another.
    wait_until(lambda: are_equal(service, num_copies), service)


def are_equal(service, num_copies):
    copies = {part: [] for part in range(NUM_PARTS)}
    for hashes in ask_all(service.servers, "hashes"):
        for part, found in hashes.items():
            copies[part].append(found)
    return all(len(found) == num_copies and len(set(found)) == 1 for found in copies.values())


def assert_replay_has_same_bits(service, snapshots):
    parameters = dict(make_model().named_parameters())
    values = [{PARAMETER: cut(parameters, part).numpy()} for part in service.job.parts]
    again = Replay(service.job, values, 0, SmallComputing())
    again.run([service.read_log(part, 0) for part in range(NUM_PARTS)])
    wanted = [{key: torch.from_numpy(array) for key, array in part.state().items()} for part in again.parts]
    assert_same_bits(snapshots, wanted)


def staleness_of(service):
    found = []
    for part in range(NUM_PARTS):
        found += [version - 1 - push.versions[part] for version, pushes in service.read_log(part, 0) for push in pushes]
    return found


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "optimizer", ["adam", pytest.param("sgd", marks=EXHAUSTIVE), pytest.param("adagrad", marks=EXHAUSTIVE)]
)
def test_a_delay_of_0_has_the_bits_of_one_process(serve, optimizer):
    service = serve(IN_STEP, max_delay=0, optimizer=optimizer)
    snapshots = train(service, range(12))
    assert_same_bits(snapshots, expected(service, optimizer, 6, 2))
    assert_all_applied(service, 12)


def test_with_a_delay_of_0_a_worker_may_miss_an_update(serve):
    """A worker that computes nothing of an update has to pull what the update made."""
    import ray

    service = serve(IN_STEP, max_delay=0)
    fast, slow = (worker.actor for worker in service.workers.values())
    ray.get([fast.join.remote("fast"), slow.join.remote("slow")])
    rates = (service.job.optimizer.groups[0]["lr"],)
    for number, actor in enumerate((fast, fast, slow, slow, slow, fast)):
        assert ray.get(actor.compute.remote(number, rates)) is not None
    ray.get([fast.rest.remote(), slow.rest.remote()])
    assert_same_bits(service.snapshot(), expected(service, "sgd", 3, 2))


def test_with_a_delay_of_0_a_batch_may_come_again_long_after_its_update(serve):
    """As that of a worker that was lost when its gradient was applied. Its parameters are gone; nobody needs them."""
    import ray

    service = serve(IN_STEP, max_delay=0)
    fast, slow = (worker.actor for worker in service.workers.values())
    ray.get([fast.join.remote("fast"), slow.join.remote("slow")])
    rates = (service.job.optimizer.groups[0]["lr"],)
    for number in range(6):
        assert ray.get(fast.compute.remote(number, rates)) is not None
    ray.get(fast.rest.remote())
    for number in (2, 6, 7):
        assert ray.get(slow.compute.remote(number, rates)) is not None
    ray.get(slow.rest.remote())
    assert_same_bits(service.snapshot(), expected(service, "sgd", 4, 2))
    assert_all_applied(service, 8)


def test_with_a_delay_of_0_kills_of_servers_and_workers_change_no_bit(serve):
    service = serve(partial(SmallComputing, 0.5, 0.02), size=Size(2, 3, 2), max_delay=0)
    killed = []

    def kill(num_done):
        if num_done == 6:
            killed.append(service.pids["server-0"])
        elif num_done == 14:
            killed.append(next(iter(service.workers.values())).pid)
        elif num_done == 24:
            killed.append(service.pids["controller-1"])
        else:
            return
        os.kill(killed[-1], signal.SIGKILL)

    snapshots = train(service, range(36), kill)
    assert len(killed) == 3 and not any(map(is_running, killed))
    assert_same_bits(snapshots, expected(service, "sgd", 18, 2))
    assert_all_applied(service, 36)
    assert any("server-0 has ended" in line for line in service.said)


@EXHAUSTIVE
def test_a_killed_primary_loses_nothing_and_workers_go_on(serve):
    service = serve(partial(SmallComputing, pause_s=0.005), size=Size(2, 2, 2), max_delay=4)
    pids = [worker.pid for worker in service.workers.values()]
    killed = []

    def kill(num_done):
        if num_done == 20:
            killed.append(service.pids["server-0"])
            os.kill(killed[0], signal.SIGKILL)

    snapshots = train(service, range(80), kill)
    assert killed and not is_running(killed[0])
    assert_all_applied(service, 80)
    assert [worker.pid for worker in service.workers.values()] == pids  # never started again
    assert max(staleness_of(service)) <= 4
    assert_replay_has_same_bits(service, snapshots)
    assert any("down to one copy" in line for line in service.said)
    wait_until(lambda: any("has 2 copies again" in line for line in service.said), service)


POINTS = [
    f"{moment} {message}"
    for message in ("Push", "Replicate", "Confirm", "Join", "Leave", "Promise", "Accepted", "Fill")
    for moment in ("before", "after", "sent")
]
LATE = ("Promise", "Accepted", "Fill")  # messages of a change of members: another server is killed first


def crash_at(serve, point, note):
    """One server ends at this point, in a job that trains on."""
    import ray

    service = serve(partial(SmallComputing, pause_s=0.002), size=Size(2, 3, 2), max_delay=2)
    fault = Fault(point, 2 if point.split()[1] in ("Push", "Replicate", "Confirm") else 0, str(note))
    at = "server-1" if point.split()[1] != "Fill" else "server-2"
    ray.get(service.servers[at].arm.remote(fault))

    def kill_first(num_done):
        if num_done == 4 and point.split()[1] in LATE:
            os.kill(service.pids["server-0"], signal.SIGKILL)

    train(service, range(40), kill_first)
    assert note.read_text() == point
    assert not is_running(service.pids[at])
    assert_all_applied(service, 40)
    assert max(staleness_of(service)) <= 2


@pytest.mark.parametrize("point", ["after Push"])
def test_a_server_that_ends_at_a_point_of_the_protocol_loses_nothing(serve, tmp_path, point):
    crash_at(serve, point, tmp_path / "fired")


@EXHAUSTIVE
@pytest.mark.parametrize("point", POINTS)
def test_a_server_that_ends_at_any_point_of_the_protocol_loses_nothing(serve, tmp_path, point):
    crash_at(serve, point, tmp_path / "fired")


def stop_for(pid, seconds):
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (pid, signal.SIGCONT)).start()


def primary_epoch(service, part=0):
    return service.courier.look(part).result()


@EXHAUSTIVE
def test_a_primary_that_stops_for_a_second_stays_primary(serve):
    service = serve(partial(SmallComputing, pause_s=0.002), max_delay=4, lease_s=4.0)
    stopped = []

    def stop(num_done):
        if num_done == 10:
            stopped.append(time.monotonic())
            stop_for(service.pids["server-0"], 1.0)

    train(service, range(60), stop)
    assert stopped and time.monotonic() - stopped[0] >= 1  # nothing is answered while it stands still
    assert primary_epoch(service).epoch == 1
    assert_all_applied(service, 60)


def test_a_primary_that_stops_for_long_is_replaced_and_refused_afterwards(serve):
    service = serve(partial(SmallComputing, pause_s=0.002), max_delay=4, lease_s=1.0)
    stopped = []

    def stop(num_done):
        if num_done == 10:
            stopped.append(service.pids["server-0"])
            stop_for(stopped[0], 6.0)

    train(service, range(200), stop)
    assert stopped
    wait_until(lambda: len(primary_epoch(service).members) == 2, service)
    assert primary_epoch(service).epoch >= 3  # taken over, and filled again
    assert primary_epoch(service).primary == "server-1"
    assert_all_applied(service, 200)


@EXHAUSTIVE
def test_a_worker_that_stands_still_is_given_up(serve):
    service = serve(partial(SmallComputing, pause_s=0.002), max_delay=2, lost_after_s=2.0)
    stopped = []

    def stop(num_done):
        if num_done == 10:
            stopped.append(next(iter(service.workers.values())).pid)
            os.kill(stopped[0], signal.SIGSTOP)

    train(service, range(60), stop)
    assert stopped
    assert any("has stood still for 2 s" in line for line in service.said)
    assert_all_applied(service, 60)


@EXHAUSTIVE
def test_all_copies_gone_is_said(serve):
    service = serve(partial(SmallComputing, pause_s=0.01), size=Size(2, 2, 1), max_delay=2)

    def kill(num_done):
        if num_done == 5:
            os.kill(service.pids["server-0"], signal.SIGKILL)

    with pytest.raises(PartLost, match="all copies of part 0 are gone"):
        train(service, range(40), kill)


@EXHAUSTIVE
def test_bf16_pushes_are_applied_on_all_copies_alike(serve):
    service = serve(max_delay=1, dtype="bf16")
    train(service, range(10))
    assert_all_applied(service, 10)


def test_a_gradient_that_is_not_finite_is_refused(serve):
    service = serve(partial(SmallComputing, bad_number=3), max_delay=1)
    with pytest.raises(NotFinite, match=r"worker-\d+\.1 has pushed a gradient of .* that is not finite, of batch 3"):
        train(service, range(8))
    for part in range(NUM_PARTS):
        assert 3 not in [push.number for _, pushes in service.read_log(part, 0) for push in pushes]


@EXHAUSTIVE
def test_a_worker_with_another_model_is_refused_before_its_first_push(serve):
    with pytest.raises(CallError, match="another model than the servers"):
        serve(partial(SmallComputing, width=40))


def descendants(pid):
    """The process and all that it has started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def test_everything_listens_on_the_loopback_alone_and_the_token_is_nowhere(serve):
    service = serve()
    train(service, range(4))
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    assert token.stat().st_mode & 0o77 == 0 or token.parent.stat().st_mode & 0o77 == 0
    secret = token.read_text()
    listing = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout
    ours = descendants(os.getpid())
    assert set(service.pids.values()) <= ours
    sockets = [line for line in listing.splitlines() if any(f"pid={pid}," in line for pid in ours)]
    assert len(sockets) > len(service.pids)
    addresses = {line.split()[3].rpartition(":")[0] for line in sockets}
    assert addresses <= {"127.0.0.1", "[::ffff:127.0.0.1]", "[::1]"}, "\n".join(sockets)
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert secret.encode() not in path.read_bytes()
        except OSError:
            continue
    logs = Path(service._ray._private.worker._global_node.get_session_dir_path())
    for path in logs.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
