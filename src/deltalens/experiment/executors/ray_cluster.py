"""The Ray that a run uses: one that is there already, a cluster that is joined, or one of its own on this machine."""

import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

from deltalens.errors import ExecutorError, InputError
from deltalens.experiment.spec import RunSpec

#: Ray's store holds one assignment: the windows' token ids.
_OBJECT_STORE_BYTES = 128 * 2**20

_REACHED_WITHIN = 10.0  # seconds

#: Ray's own reports would mix with a run's output; deaths of workers are told by the executor.
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",
}


@dataclass(frozen=True)
class Share:
    """What one worker takes of the cluster, and the device that it loads the model on."""

    cpus: int
    gpus: float
    device: str | None

    def __str__(self) -> str:
        return f"{self.cpus} CPU{'s' * (self.cpus != 1)} and {self.gpus:g} GPU{'s' * (self.gpus != 1)}"

    def fits(self, resources: dict[str, float]) -> int:
        """How many workers a node with these resources holds."""
        by_cpu = int(resources.get("CPU", 0) // self.cpus)
        return min(by_cpu, int(resources.get("GPU", 0) // self.gpus)) if self.gpus else by_cpu


def worker_share(spec: RunSpec, *, on_gpu: bool) -> Share:
    """What a spec asks for each worker; by default a GPU where the driver has one.

    With several GPUs, the model is spread over them; with none, a worker stays on the CPU.
    """
    gpus = float(on_gpu) if spec.gpus_per_worker is None else spec.gpus_per_worker
    return Share(spec.cpus_per_worker, gpus, "auto" if gpus > 1 else None if gpus else "cpu")


class RayCluster:
    """Opens Ray, says how many workers it holds, and shuts down only what it started itself."""

    def __init__(self, spec: RunSpec, share: Share, *, layers: int) -> None:
        self._spec, self._share, self._layers = spec, share, layers
        self._address = spec.ray_address or os.environ.get("RAY_ADDRESS") or "local"
        self._opened = False
        self.workers = 0

    def open(self) -> None:
        """Start or join Ray.

        Raises:
            InputError: Ray isn't installed, or its nodes are too small for one worker.
            ExecutorError: no cluster answers at the address.
        """
        ray = import_ray()
        if not ray.is_initialized():
            self._join(ray) if self._address != "local" else self._start(ray)
            self._opened = True
        self.workers = min(self._layers, self._spec.workers or self._held(ray))

    def close(self) -> None:
        """Leave the cluster; end Ray where it is this run's own."""
        if self._opened:
            import_ray().shutdown()
            self._opened = False

    def _start(self, ray: Any) -> None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ray.init(
            address="local",
            num_cpus=max(cores, (self._spec.workers or 1) * self._share.cpus),
            object_store_memory=_OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )

    def _join(self, ray: Any) -> None:
        require_answer(self._address)
        try:
            ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ExecutorError(
                f"no Ray cluster can be joined at {self._address}: {str(error).splitlines()[0]}; "
                f"start one with: ray start --head, and set RAY_AUTH_MODE=token here too if it wants a token"
            ) from None

    def _held(self, ray: Any) -> int:
        """How many workers the nodes hold that are there now."""
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        held = sum(self._share.fits(resources) for resources in nodes)
        if held == 0:
            largest = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes[:3])
            raise InputError(
                f"a Ray worker asks for {self._share}, but the nodes have {largest}; lower --cpus-per-worker or "
                f"--gpus-per-worker, or give --workers to wait for larger nodes"
            )
        return held


def import_ray() -> Any:
    """Ray, told to be quiet before its first import.

    Raises:
        InputError: it isn't installed.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError:
        raise InputError("executor 'ray' needs Ray; install it with: pip install 'deltalens[ray]'") from None
    return ray


def require_answer(address: str) -> None:
    """Refuse at once what Ray itself would wait minutes for.

    Raises:
        InputError: it isn't an address of a cluster that this process is part of.
        ExecutorError: nothing listens there.
    """
    if "://" in address:
        raise InputError(
            f"ray_address is '{address}', but the run itself must be on a node of the cluster; give HOST:PORT or 'auto'"
        )
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"ray_address is '{address}'; give HOST:PORT, 'auto' or 'local'")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHED_WITHIN).close()
    except OSError as error:
        raise ExecutorError(
            f"nothing answers at {address} ({error.strerror or error}); start a cluster there with: ray start --head"
        ) from None
