"""torchrun, ended with its launcher, and with the shutdown timeout that it has no option for before torch 2.12.

Runs as `python -m tailtune.train.torchrun SECONDS …`, in place of
`python -m torch.distributed.run --shutdown-timeout=SECONDS …`.
Training images of OpenShift AI ship torch 2.9, which kills ranks 30 seconds after SIGTERM.
"""

import sys
from importlib import metadata

from packaging.version import Version

from tailtune.lifeline import hold_lifeline


def main() -> int | None:
    """Run torchrun with the command line's other arguments. Returns its exit status."""
    hold_lifeline()
    from torch.distributed import run

    seconds = sys.argv.pop(1)
    if Version(metadata.version("torch")) < Version("2.12"):
        from torch.distributed.elastic.multiprocessing.api import PContext

        PContext.close.__defaults__ = (None, int(seconds))  # (death_sig, timeout): torchrun gives the first alone
    else:
        sys.argv.insert(1, f"--shutdown-timeout={seconds}")
    status: int | None = run.main()  # None: torchrun raises its failures
    return status


if __name__ == "__main__":
    sys.exit(main())
