"""torchrun of a torch before 2.12, with the shutdown timeout that it has no option for.

Runs as `python -m tailtune.train.torchrun_compat SECONDS …`, in place of
`python -m torch.distributed.run --shutdown-timeout=SECONDS …`.
Training images of OpenShift AI ship torch 2.9, which kills ranks 30 seconds after SIGTERM.
"""

import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import PContext


def main() -> None:
    """Run torchrun with the command line's other arguments."""
    PContext.close.__defaults__ = (None, int(sys.argv.pop(1)))  # (death_sig, timeout): torchrun gives the first alone
    run.main()


if __name__ == "__main__":
    main()
