"""A pod's log, line by line, each line once: across broken connections and restarted containers."""

import re
import threading
import time
from collections.abc import Callable

from kubernetes import client
from urllib3.exceptions import HTTPError

from tailtune.errors import one_line
from tailtune.log import log

READ_SECONDS = 60
"""A stream without a line for this long is reopened, because a dead connection looks the same."""
RETRY_SECONDS = 2.0
MAX_FAILED_READS = 10
"""Once the pod has ended: give up after this many consecutive failed reads without a new line."""
TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?Z ?")


def split_timestamp(line: str) -> tuple[str, str] | None:
    """(timestamp with nanoseconds, text) of a line as the kubelet writes it; None for a line without a timestamp.

    These timestamps sort in the order of time.
    """
    match = TIMESTAMP.match(line)
    return (f"{match[1]}.{(match[2] or '')[:9]:0<9}", line[match.end() :]) if match else None


class LineDeduplicator:
    """Passes each line of a log once, although the log is read several times, each time from some earlier line on.

    Knows the latest timestamp that has passed, and how many lines had it. All lines of the first reading pass: stdout
    and stderr are merged there, and may be slightly out of order.
    """

    def __init__(self) -> None:
        self.latest, self.num_latest = "", 0
        """Latest timestamp, and the number of lines with it that have passed."""
        self._num_seen, self._is_skipping = 0, False

    def restart(self) -> None:
        """Begin another reading of the log."""
        self._num_seen, self._is_skipping = 0, True

    def __call__(self, line: str) -> str | None:
        """The line without its timestamp, or None if it has passed before."""
        parts = split_timestamp(line)
        if parts is None:
            return line  # the rest of a line that the runtime has split, or an error of the API
        timestamp, text = parts
        if self._is_skipping:
            if timestamp < self.latest:
                return None
            if timestamp == self.latest:
                self._num_seen += 1  # lines of this reading with the latest timestamp
                if self._num_seen <= self.num_latest:
                    return None
            self._is_skipping = timestamp == self.latest
        if timestamp > self.latest:
            self.latest, self.num_latest = timestamp, 0
        self.num_latest += timestamp == self.latest
        return text


class PodLog(threading.Thread):
    """Follows the log of a pod's container until `end` is called, and passes each line to `show`."""

    def __init__(
        self,
        core: Callable[[], client.CoreV1Api],
        namespace: str,
        pod: str,
        container: str,
        show: Callable[[str], None],
    ) -> None:
        super().__init__(name=f"log of {pod}", daemon=True)
        self._core, self._container, self._show = core, container, show
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        self._deduplicate = LineDeduplicator()
        self._has_warned = False
        self._ended = threading.Event()
        self._num_restarts_read = 0
        self.num_restarts = 0
        """Restarts of the container according to its pod's status; set by the follower."""

    def end(self) -> None:
        """The container has ended: read the rest of its log, then stop."""
        self._ended.set()

    def run(self) -> None:
        num_failed = 0  # reads in a row that were cut short without a new line
        while num_failed < MAX_FAILED_READS:
            is_last = self._ended.is_set()  # checked before reading, so that no line is missed
            if self.num_restarts > self._num_restarts_read:  # the container was restarted between two reads
                self._read("previous")
                self._num_restarts_read = self.num_restarts
            position = self._deduplicate.latest, self._deduplicate.num_latest
            is_complete = self._read(*([] if is_last else ["follow"]))
            if is_last and is_complete:
                return
            if not is_last:
                self._ended.wait(RETRY_SECONDS)
            elif position == (self._deduplicate.latest, self._deduplicate.num_latest):
                num_failed += 1
                time.sleep(RETRY_SECONDS / 4)

    def _read(self, *flags: str) -> bool:
        """Read the log and pass on its new lines; return whether it was read to its end.

        `flags` are `follow`, or `previous` for the container before its restart.
        """
        query = [("container", self._container), ("timestamps", "true"), *((flag, "true") for flag in flags)]
        if latest := self._deduplicate.latest:  # sinceTime has whole seconds, and cuts off fractions
            query.append(("sinceTime", f"{latest.partition('.')[0]}Z"))
        self._deduplicate.restart()
        rest = b""
        try:
            # the client's own function has only sinceSeconds, which depends on two clocks
            response = self._core().api_client.call_api(
                self._path, "GET", query_params=query, auth_settings=["BearerToken"], _return_http_data_only=True,
                _preload_content=False, _request_timeout=(10, READ_SECONDS),
            )  # fmt: skip
            for chunk in response.stream(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._pass_on(line)
            if rest:
                self._pass_on(rest)
        except (client.ApiException, HTTPError, OSError):
            return False  # no container yet, a broken connection, a failing server: continue from the last line
        except Exception as error:  # the log must not end the job, but missing lines have to be reported
            if not self._has_warned:
                log.warning("train: reading the %s failed, lines may be missing (%s: %s)", self.name,
                            type(error).__name__, one_line(error, 200))  # fmt: skip
            self._has_warned = True
            return False
        return True

    def _pass_on(self, line: bytes) -> None:
        text = self._deduplicate(line.decode(errors="backslashreplace"))
        if text is not None:
            self._show(text)
