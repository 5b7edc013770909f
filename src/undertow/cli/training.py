"""One process of a training run: the run's folder, the model, the data, and the loop.

In: the options, and which of the run's processes this is. Out: the result. Rank 0 has the folder.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from undertow.cli.loading import running
from undertow.cli.workloads import load_callbacks, load_user_code, load_workload, report_code
from undertow.train.config import TrainConfig
from undertow.train.devices import choose_device
from undertow.train.environment import find_same_device, use_same_threads, use_threads
from undertow.train.folder import RunFolder, new_folder
from undertow.train.job import Job
from undertow.train.progress import Silent, make_display
from undertow.train.result import TrainResult
from undertow.train.run import Run


def train(settings: TrainConfig, is_resumed: bool, job: Job, make_run: Callable[..., Run] = Run) -> TrainResult:
    """Train to the end, or until a signal."""
    found = job.decide(lambda: settings.out if settings.out is not None else str(new_folder(settings)))
    folder = RunFolder(Path(found))
    with ExitStack() as stack, running(f"training {settings.model} on {settings.data}"):
        loading = stack.enter_context(ExitStack())
        loading.enter_context(job.doing("loading"))
        if is_resumed and job.is_first:
            stack.enter_context(folder.lock())
        device = choose_device(settings.device)
        # A run that was killed before its first checkpoint begins again.
        checkpoint = folder.read_checkpoint() if is_resumed and folder.checkpoint_path.exists() else None
        if checkpoint is None:
            use_threads(settings)
        else:
            use_same_threads(checkpoint)
            device = find_same_device(checkpoint, device)
        if not is_resumed and job.is_first:
            folder.check_is_free()
            folder.check_can_be_made()
        code = load_user_code(settings)
        if job.is_first:
            code = replace(code, callbacks=load_callbacks(settings))
        workload = load_workload(settings, device.type == "cuda")
        stack.callback(workload.close)
        if is_resumed:
            report_code(settings.model, settings.data, settings.loss, *(settings.metric or ()))
        run = make_run(settings, workload, folder, make_display() if job.is_first else Silent(), device, code, job)
        if checkpoint is not None:
            run.resume(checkpoint)
        run.prepare()
        if job.is_first and is_resumed:
            folder.write_config(settings)
        elif job.is_first:
            stack.enter_context(folder.lock())
            folder.create(settings)
        loading.close()
        return run.train()
