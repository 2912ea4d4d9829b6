"""Who runs the units of a plan: this process, or workers elsewhere. One file per executor, one row here."""

from collections.abc import Callable, Mapping

from deltalens.errors import InputError
from deltalens.experiment.executors.assignment import Assignment
from deltalens.experiment.executors.local import LocalExecutor
from deltalens.experiment.executors.protocol import Executor
from deltalens.experiment.executors.ray import RayExecutor
from deltalens.experiment.executors.ray_cluster import import_ray
from deltalens.experiment.plan import Plan
from deltalens.experiment.progress import Progress
from deltalens.experiment.spec import RunSpec

__all__ = ["EXECUTORS", "Assignment", "Executor", "check_executor", "executor_for"]

#: The names that `RunSpec.executor` takes, each with what makes the executor of a plan.
EXECUTORS: Mapping[str, Callable[[Plan, Progress], Executor]] = {"local": LocalExecutor, "ray": RayExecutor}


def executor_for(plan: Plan, progress: Progress) -> Executor:
    """The executor that a plan's spec names."""
    return EXECUTORS[plan.spec.executor](plan, progress)


def check_executor(spec: RunSpec, *, model_in_memory: bool) -> None:
    """Refuse before the model is loaded what its workers could never load.

    Raises:
        InputError: Ray isn't installed, or the model lives in this process alone.
    """
    if spec.executor != "local" and model_in_memory:
        raise InputError(
            f"executor '{spec.executor}' loads the model in every worker, but a loaded model was given; "
            f"give its name or path instead"
        )
    if spec.executor == "ray":
        import_ray()
