"""torchrun for tests of the launcher in which no rank fails: starts the ranks, prefixes their lines, forwards SIGTERM.

No rendezvous and no restarts: those tests use the real one.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading


def copy_lines(process: "subprocess.Popen[str]", rank: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        print(f"[rank {rank}] {line}", end="", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("nnodes", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf", "local-addr", "tee",
                 "log-dir", "max-restarts", "monitor-interval", "shutdown-timeout"):  # fmt: skip
        parser.add_argument(f"--{name}")
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("-m", dest="module")
    options, args = parser.parse_known_args()
    first = int(os.environ["PET_NODE_RANK"]) * options.nproc_per_node
    processes = []
    for rank in range(first, first + options.nproc_per_node):
        environment = {**os.environ, "RANK": str(rank)}
        command = [sys.executable, "-m", options.module, *args]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                          env=environment))  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: [process.terminate() for process in processes])
    threads = [threading.Thread(target=copy_lines, args=(process, first + i)) for i, process in enumerate(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
