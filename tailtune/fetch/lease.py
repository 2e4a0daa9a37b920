"""One writer at a time, among processes on machines that share a volume.

There are no file locks here, because network file systems do not have them reliably. A lease is a file that its holder
creates exclusively and then rewrites every few seconds. After the death of its holder it no longer changes, and
whoever waits takes it over. If a holder was only silent, two may write for a while: what is written must be checked
before it is published.
"""

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tailtune.files import discard
from tailtune.log import log

BEAT_SECONDS = 10.0
SILENT_SECONDS = 60.0
"""A lease that has not changed for this long may be taken over. Each one measures this with its own clock, and by the
content, because machines disagree about the time, and may remember a file's old modification time for a minute."""
POLL_SECONDS = 1.0


@contextmanager
def one_writer(lease: Path, is_done: Callable[[], bool], shown: str) -> Iterator[None]:
    """Enter the block as the only holder of `lease`, or as soon as `is_done()`.

    `shown` is what the holder writes, for the log.
    """
    holder = uuid.uuid4().hex
    seen, since = "", time.monotonic()
    while not is_done() and not _create(lease, holder):
        now = _read(lease)
        if now and now != seen:
            if not seen:
                log.info("fetch: another run is fetching %s: waiting for it", shown)
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > SILENT_SECONDS:
            log.info("fetch: the run that was fetching %s has stopped: going on in its place", shown)
            with suppress(FileNotFoundError):  # another one was faster
                discard(lease)
            seen, since = "", time.monotonic()
        else:
            time.sleep(POLL_SECONDS)
    done = threading.Event()
    thread = threading.Thread(target=_beat, args=(lease, holder, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        if _read(lease).startswith(holder):
            lease.unlink(missing_ok=True)


def _create(lease: Path, holder: str) -> bool:
    """Create the file; return False if there is one.

    Where no file can be written, there can be no holder; the writer will meet the same error, and explain it.
    """
    try:
        lease.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(lease, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o664), "w") as file:
            file.write(f"{holder} 0")
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _beat(lease: Path, holder: str, done: threading.Event) -> None:
    count = 0
    while not done.wait(BEAT_SECONDS):
        if not _read(lease).startswith(holder):
            return  # nothing to hold, or taken over
        with suppress(OSError):
            lease.write_text(f"{holder} {(count := count + 1)}")


def _read(lease: Path) -> str:
    """Return the lease's content; empty if there is none. Opening the file makes NFS ask the server for it."""
    with suppress(OSError):
        return lease.read_text()
    return ""
