"""What went wrong in a job, in one class, with what to try."""

import re
from dataclasses import dataclass

from tailtune.jobs.pods import Failure

NUM_SHOWN_LINES = 12


@dataclass(frozen=True)
class FailureClass:
    name: str
    pattern: str
    """Regular expression on Kubernetes' reason, torchrun's account and the last lines."""
    remedy: str


CLASSES = (
    FailureClass("preempted", r"Preempt|Evicted|NodeShutdown|DeletionByTaintManager|NodeLost",
          "the node was taken away; run again, it resumes from the last checkpoint"),
    FailureClass("out of memory on the GPU", r"OutOfMemoryError|CUDA out of memory|CUDA error: out of memory"
                                      r"|Cuda failure \d* ?'out of memory'|CUBLAS_STATUS_ALLOC_FAILED",
          "lower batch_size and raise stages.0.trainer.gradient_accumulation_steps, then lower max_length"),
    FailureClass("shared memory", r"out of shared memory|insufficient shared memory|creating shared memory segment"
                           r"|failed to extend /dev/shm|unable to (open|write to|mmap) .*shared memory",
          "raise resources.memory, which /dev/shm is part of, or lower stages.0.trainer.dataloader_num_workers"),
    FailureClass("out of memory on the host", r"OOMKilled|exit status (-9|137)\b|DefaultCPUAllocator"
                                       r"|DataLoader worker \(pid \d+\) is killed by signal: Killed",
          "raise resources.memory, or set stages.0.tail.cache=disk"),
    FailureClass("a GPU or its driver", r"uncorrectable (ECC|NVLink) error|GPU is lost|fallen off the bus"
                                 r"|CUDA driver version is insufficient|driver on your system is too old"
                                 r"|no kernel image is available|CUDA-capable device\(s\) is/are busy",
          "run again, on another node when it stays so (resources.node_selector); oc debug node/… shows nvidia-smi"),
    FailureClass("network between the ranks", r"NCCL error|WorkNCCL|NCCL communicator was aborted|nccl\w+Error"
                                       r"|[Gg]loo/transport|Gloo connectFullMesh|Dist(Network|Store|Backend)Error"
                                       r"|Rendezvous(Timeout|Connection|Closed)|Connection (refused|reset|closed) by"
                                       r"|Socket Timeout|client socket has (timed out|failed)",
          "check that the network policy lets the job's pods reach each other, and whether another rank died first"),
    FailureClass("a full volume", r"No space left on device|Disk quota exceeded",
          "free space on the volumes, or ask for larger claims"),
    FailureClass("volume", r"persistentvolumeclaim \S+ not found|FailedMount|FailedAttachVolume",
          "make the claims (oc apply -k deploy/), or name your own with -p workspace_pvc= and its like"),
    FailureClass("image", r"ImagePullBackOff|ErrImagePull|InvalidImageName|ErrImageNeverPull|ImageInspectError",
          "check --image-registry and the run's trainer_image, and that the image exists: oc get istag"),
    FailureClass("scheduling", r"Unschedulable|did not start within|Insufficient|untolerated taint",
          "ask for fewer nodes or less (resources.*), wait for the queue, or set resources.tolerations"),
)  # fmt: skip
CODE_FAULT = FailureClass("code", "", "the lines above show where; the whole log is in the pod")


def classify(text: str) -> FailureClass:
    """The first class whose pattern is in the text; a fault of the code when none is."""
    return next((one for one in CLASSES if re.search(one.pattern, text)), CODE_FAULT)


def explain(job: str, failures: list[Failure], ended: str) -> str:
    """One message: the first failing rank, exit code, class, last lines, remedy. `ended` is the job's own reason."""
    for failure in failures:
        if error := failure.words.get("user_error"):
            return str(error)
    if not failures:
        kind = classify(ended)
        return f"job '{job}' failed ({kind.name}): {ended}; {kind.remedy}"
    first = failures[0]
    lines = [str(line) for line in first.words.get("lines") or []][-NUM_SHOWN_LINES:]
    account = first.words.get("failure") or f"exit status {first.exit_code}"
    kind = classify("\n".join([first.reason, f"exit status {first.exit_code}", str(account), *lines]))
    output = "".join(f"\n    {line}" for line in lines)
    return f"job '{job}' failed ({kind.name}) in pod {first.pod}, {first.reason}: {account}; {kind.remedy}" + (
        f"; its last lines:{output}" if output else ""
    )
