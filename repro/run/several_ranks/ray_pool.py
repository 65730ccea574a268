"""Runs as tasks of a Ray cluster: `--executor ray`.

The command plans, claims and displays as usual (`repro.run.execute`); a task goes to a host with
room, where a pool of one worker carries it out. Hosts share only the folder of records: progress is
read from metrics.jsonl there, so no actor is lost with a host. A lost host is handled like a lost
worker; Ray, which knows neither checkpoints nor records, repeats nothing.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from repro.evidence.record import run_folder
from repro.run.several_ranks.rank_processes import identity_of, require_alike
from repro.run.worker import Event, Task
from repro.run.workers import WorkerPool
from repro.runlog.run_logger import read_lines
from repro.spec.checks import require


def join_cluster(runs: Path, needs: Mapping[str, int]) -> list[tuple[int, int]]:
    """Join the cluster and check its hosts; return each one's room for runs at once, and its CPUs.

    A run takes `needs` of one host, as Ray names them. Raises `ValueError` without ray, a cluster
    or room, and where a host does not see the folder of records, or has another source or packages.
    """
    installed = importlib.util.find_spec("ray") is not None
    require(installed, "--executor ray: ray is not installed: pip install 'qerl-repro[ray]'")
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    ((kind, needed),) = needs.items()
    name = "the cluster"
    try:
        ray.init("auto", ignore_reinit_error=True, log_to_driver=False, logging_level="ERROR")
        hosts = _each_has(kind)
        most = max(hosts)[0]
        require(
            most >= needed,
            f"--executor ray: {kind} is at most {most} on a host; a run needs {needed} on one",
        )
        look = ray.remote(num_cpus=0, max_calls=1)(_seen)
        with tempfile.NamedTemporaryFile(prefix=".ray-", dir=runs.absolute()) as file:
            for host in filter(lambda host: host["Alive"], ray.nodes()):
                name, there_alone = host["NodeManagerHostname"], On(host["NodeID"], soft=False)
                seen = look.options(scheduling_strategy=there_alone).remote(Path(file.name))
                shared, identity = ray.get(seen, timeout=120)
                require(
                    shared, f"--runs {runs}: {name} does not see it; hosts need a shared folder"
                )
                require_alike([identity_of(socket.gethostname()), identity])
    except ConnectionError as error:
        raise ValueError(
            "--executor ray: this machine is in no Ray cluster; start one: ray start --head, and "
            "on every other host ray start --address=THIS_HOST:6379"
        ) from error
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[-1]
        raise ValueError(f"--executor ray: {name} cannot carry out runs: {why}") from error
    return sorted((there // needed, cpus) for there, cpus in hosts)


def _each_has(kind: str) -> list[tuple[int, int]]:
    """Return how many each live host has of what `ray.remote` names so, and of CPUs."""
    import ray

    resource = {"num_gpus": "GPU", "num_cpus": "CPU"}[kind]
    live = [host["Resources"] for host in ray.nodes() if host["Alive"]]
    return [(int(has.get(resource, 0)), int(has.get("CPU", 0))) for has in live]


def _seen(file: Path) -> tuple[bool, dict[str, Any]]:
    return file.exists(), identity_of(socket.gethostname())


def _carried(task: Task, going: Path, settings: Mapping[str, str], **how: Any) -> Event:
    """Carry out a task on this host as long as a file exists; return how it ended."""
    os.environ.update(settings)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    log = task.runs / f"workers-{socket.gethostname()}.log"
    ending = Event(task=task, kind="stopped")
    with WorkerPool(1, log, devices=[visible] if visible else [], **how) as pool:
        for event in pool.execute([task] if going.exists() else []):
            ending = event
            if not going.exists():
                pool.stop()
    return ending


class RayPool(WorkerPool):
    """A `WorkerPool` whose workers are hosts; each run takes `needs` of one, as Ray names them."""

    def __init__(self, needs: Mapping[str, int], count: int, log: Path, *how: Any, **more: Any):
        super().__init__(count, log, *how, **more)
        import ray

        self._ray, self._running = ray, dict[Any, Task]()
        ((self._kind, self._needed),) = needs.items()
        # This file exists in the shared folder as long as runs may continue.
        self._going = Path(tempfile.mkstemp(prefix=".ray-", dir=log.parent.absolute())[1])
        self._submit = partial(
            ray.remote(max_retries=0, max_calls=1, **needs)(_carried).remote,
            going=self._going,
            settings={key: text for key, text in os.environ.items() if key.startswith("REPRO_")},
            threads=self.threads,
            grace=self.grace,
            retries=self.retries,
            carry_out=self.carry_out,
        )

    def execute(self, tasks: Sequence[Task]) -> Iterator[Event]:
        """Yield events until all tasks have ended; begin as many as there is room for."""
        waiting, steps = deque(tasks), dict[Path, int]()
        while self._running or (waiting and not self._asked_to_stop):
            yield from self._fill(waiting)
            if not self._running:
                time.sleep(self.look_seconds)
            for answer in self._ray.wait([*self._running], timeout=self.look_seconds)[0]:
                yield self._ending(answer, self._running.pop(answer), waiting)
            for task in self._running.values():
                lines = read_lines(run_folder(task.run, task.runs) / "metrics.jsonl")
                if lines and lines[-1]["step"] != steps.get(task.folder):
                    steps[task.folder] = lines[-1]["step"]
                    values = {"step": steps[task.folder], "steps": task.run.scale.steps}
                    yield Event(task=task, kind="progress", text="training", values=values)

    def _fill(self, waiting: deque[Task]) -> Iterator[Event]:
        """Submit tasks where there is room; those that wait for it any other start may claim."""
        room = sum(there // self._needed for there, _ in _each_has(self._kind))
        while waiting and not self._asked_to_stop and len(self._running) < room:
            task, elsewhere = self._next_free(waiting)
            yield from elsewhere
            if task is None:
                return
            self._running[self._submit(task)] = task

    def _ending(self, answer: Any, task: Task, waiting: deque[Task]) -> Event:
        """Return how a task ended; that of a lost host may go back into the queue."""
        try:
            event: Event = self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            event = self._dead(task, f"its host was lost: {str(error).splitlines()[0]}", waiting)
        if event.kind == "disk":
            self.stop()  # the other runs have the same disk
        return event

    def stop(self) -> None:
        """Let every run stop after its next step; then `execute` ends."""
        super().stop()
        self._going.unlink(missing_ok=True)

    def close(self) -> None:
        """End every run at once; those under way can be resumed from their checkpoints."""
        self._going.unlink(missing_ok=True)
        for answer in self._running:
            self._ray.cancel(answer, force=True)
