"""Explain a failed job: the class of the failure, and what to try."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tailtune.jobs.job import JobFailed, PermanentFailure
from tailtune.jobs.pods import Failure

NUM_SHOWN_LINES = 12


@dataclass(frozen=True)
class FailureClass:
    """A class of failures that have the same remedy."""

    name: str
    pattern: str
    """Regular expression that matches Kubernetes' reason, torchrun's report, or the last lines of the log."""
    remedy: str
    recurs: bool = False
    """Whether another attempt would fail in the same way."""


CLASSES = (
    FailureClass(
        "preempted",
        r"Preempt|Evicted|NodeShutdown|DeletionByTaintManager|NodeLost",
        "the node was taken away; run again to resume from the last checkpoint",
    ),
    FailureClass(
        "out of memory on the GPU",
        r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory"
        r"|Cuda failure \d* ?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED",
        "lower batch_size and raise stages.0.trainer.gradient_accumulation_steps, then lower max_length",
        recurs=True,
    ),
    FailureClass(
        "shared memory",
        r"out of shared memory|insufficient shared memory|creating shared memory segment"
        r"|failed to extend /dev/shm|unable to (open|write to|mmap) .*shared memory",
        "raise the job's resources.memory, which /dev/shm is part of, or lower stages.0.trainer.dataloader_num_workers",
    ),
    FailureClass(
        "out of memory on the host",
        r"OOMKilled|DefaultCPUAllocator",
        "raise the job's resources.memory, or set stages.0.tail.cache=disk",
        recurs=True,
    ),
    FailureClass(
        "killed from outside",
        r"exit status (-9|-15|137|143)\b|is killed by signal: Killed",
        "look for a reboot, an eviction, a deleted pod or an OOM kill in oc get events and oc describe node, and run "
        "again to resume from the last checkpoint",
    ),
    FailureClass(
        "a GPU or its driver",
        r"uncorrectable (ECC|NVLink) error|GPU is lost|fallen off the bus"
        r"|CUDA driver version is insufficient|driver on your system is too old"
        r"|no kernel image is available|CUDA-capable device\(s\) is/are busy",
        "run again, on another node if it recurs (resources.node_selector); oc debug node/… shows nvidia-smi",
    ),
    FailureClass(
        "network between the ranks",
        r"NCCL error|WorkNCCL|NCCL communicator was aborted|nccl\w+Error"
        r"|[Gg]loo/transport|Gloo connectFullMesh|Dist(Network|Store|Backend)Error"
        r"|Rendezvous(Timeout|Connection|Closed)|Connection (refused|reset|closed) by"
        r"|Socket Timeout|client socket has (timed out|failed)",
        "check that the network policy lets the job's pods reach each other, and whether another rank died first",
    ),
    FailureClass(
        "a full volume",
        r"No space left on device|Disk quota exceeded",
        "free space on the volumes, or ask for larger claims",
    ),
    FailureClass(
        "volume",
        r"persistentvolumeclaim \S+ not found|FailedMount|FailedAttachVolume",
        "create the claims (oc apply -k deploy/), or name your own with -p workspace_pvc= and the like",
    ),
    FailureClass(
        "image",
        r"ImagePullBackOff|ErrImagePull|InvalidImageName|ErrImageNeverPull|ImageInspectError",
        "check --image-registry and the run's trainer_image, and that the image exists: oc get istag",
    ),
    FailureClass(
        "configuration",
        r"CreateContainerConfigError|CreateContainerError",
        "the message names the secret, config map or security setting; oc describe pod shows the rest",
    ),
    FailureClass(
        "scheduling",
        r"Unschedulable|did not start within|Insufficient|untolerated taint",
        "ask for fewer nodes or less (resources.*), wait for the queue, or set resources.tolerations",
    ),
)
CODE_FAULT = FailureClass("code", "", "the lines above show where")
UNSEEN_FAULT = FailureClass(
    "unknown",
    "",
    "its pods were gone before their end could be read; look for deleted pods in oc get events and at their last lines "
    "above, and run again to resume from the last checkpoint",
)


def classify(text: str, default: FailureClass = CODE_FAULT) -> FailureClass:
    """The first class whose pattern occurs in the text, else `default`."""
    return next((failure_class for failure_class in CLASSES if re.search(failure_class.pattern, text)), default)


def would_recur(failures: Iterable[Failure]) -> bool:
    """Whether another attempt would fail in the same way, by a rank's own report or the class of a failure."""
    return any(failure.user_error or _classify(failure)[0].recurs for failure in failures)


def explain(job: str, failures: list[Failure], ended: str) -> JobFailed:
    """The error to raise for a failed job: first failing rank, exit code, class, remedy and last lines.

    `failures` are in the order in which they happened; `ended` is the reason in the job's own status. If a rank has
    reported a user error, the error has the rank's own words. A failure that would recur comes before all others, and
    is a PermanentFailure.
    """
    for failure in failures:
        if error := failure.user_error:
            return PermanentFailure(error.problem, error.remedy)
    if not failures:
        failure_class = classify(ended, UNSEEN_FAULT)
        return JobFailed(f"job '{job}' failed ({failure_class.name}): {ended}", failure_class.remedy)
    shown = next((failure for failure in failures if _classify(failure)[0].recurs), failures[0])
    failure_class, cause, lines = _classify(shown)
    return (PermanentFailure if failure_class.recurs else JobFailed)(
        f"job '{job}' failed ({failure_class.name}) in pod {shown.pod}, {shown.reason}: {cause}",
        failure_class.remedy,
        details=["its last lines:", *lines] if lines else (),
    )


def _classify(failure: Failure) -> tuple[FailureClass, str, list[str]]:
    """Class, cause and last lines of a failure."""
    lines = [str(line) for line in failure.report.get("lines") or []][-NUM_SHOWN_LINES:]
    cause = str(failure.report.get("failure") or f"exit status {failure.exit_code}")
    return classify("\n".join([failure.reason, f"exit status {failure.exit_code}", cause, *lines])), cause, lines
