"""`undertow train` as one of several ranks, started by torchrun or by `undertow train` itself.

In: the options, which all ranks share. Out: the exit code. Rank 0 prints what one process would. The others are silent:
what goes wrong in one of them is told to all. Of a rank that is lost, the launcher speaks; under torchrun, which has
none, the first rank that is left.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout

from undertow.cli.exits import exit_code
from undertow.cli.launching import end_with_launcher
from undertow.cli.run_commands import report_training
from undertow.errors import CallError, RankLost, UndertowError
from undertow.ranks.started import is_launched
from undertow.train.config import TrainConfig


def train_as_rank(settings: TrainConfig, is_resumed: bool, is_json: bool) -> int:
    """Run one rank to the end of the job."""
    if is_launched():
        end_with_launcher()
    num_ranks = settings.mesh.num_ranks
    is_first = os.environ["RANK"] == "0"
    try:
        if os.environ["WORLD_SIZE"] != str(num_ranks):
            raise CallError(
                f"{os.environ['WORLD_SIZE']} processes were started, and the options are for {num_ranks}: give "
                f"--parallel {settings.mesh.with_ranks(int(os.environ['WORLD_SIZE']))}, or start others"
            )
        if settings.max_restarts and not is_launched():
            raise CallError("--max-restarts is for ranks that undertow train starts; torchrun has an option of its own")
        with ExitStack() as stack:
            if not is_first:
                silence = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(redirect_stdout(silence))
                stack.enter_context(redirect_stderr(silence))
            return report_training(lambda: _train(settings, is_resumed), is_json)
    except RankLost as lost:
        speaker = "1" if lost.rank == 0 else "0"
        if is_launched() or os.environ["RANK"] != speaker:
            return exit_code(lost)
        raise
    except UndertowError as error:
        if not is_first:
            return exit_code(error)
        raise


def _train(settings: TrainConfig, is_resumed: bool) -> object:
    from undertow.cli.training import train
    from undertow.ranks.ranks import join
    from undertow.train.devices import AUTO, see_one_gpu
    from undertow.train.job import Job

    if settings.mesh.num_ranks == 1:
        return train(settings, is_resumed, Job())
    if settings.device in (AUTO, "cuda"):
        see_one_gpu(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    job = Job(join(settings.mesh, settings.lost_after), settings.mesh)
    with job.reporting(""):
        print(f"undertow: {job}", file=sys.stderr)
        return train(settings, is_resumed, job)
