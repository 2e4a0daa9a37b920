"""The log of a pod, line by line, once each: across broken connections and restarted containers."""

import re
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from kubernetes import client
from urllib3.exceptions import HTTPError

from tailtune.log import log

READ_SECONDS = 60
"""A stream without a line for so long is opened again: a dead connection looks the same."""
RETRY_SECONDS = 2.0
LAST_TRIES = 10
STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?Z ?")


def parse_stamp(line: str) -> tuple[int, str] | None:
    """(nanoseconds since 1970, the rest) of a line with a timestamp as the kubelet writes it."""
    found = STAMP.match(line)
    if found is None:
        return None
    seconds = int(datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp())
    return seconds * 10**9 + int((found[2] or "").ljust(9, "0")[:9]), line[found.end() :]


class LineDeduplicator:
    """Lets every line of a log pass once, however often the log is read from somewhere before its end.

    What has passed is known by the latest timestamp and the number of lines with it. Within one reading all
    lines pass: stdout and stderr are merged, and may be a little out of order.
    """

    def __init__(self) -> None:
        self.last, self.passed = 0, 0
        """Latest timestamp, in nanoseconds, and how many lines with it have passed."""
        self._again, self._skipping = 0, False

    def restart(self) -> None:
        """The log is read again."""
        self._again, self._skipping = 0, True

    def __call__(self, line: str) -> str | None:
        """The line without its timestamp, or None when it has passed before."""
        parsed = parse_stamp(line)
        if parsed is None:
            return line  # the rest of a line that the runtime has cut, or an error of the API
        stamp, text = parsed
        if self._skipping and stamp < self.last:
            return None
        if self._skipping and stamp == self.last:
            self._again += 1
            if self._again <= self.passed:
                return None
        self._skipping = self._skipping and stamp <= self.last
        if stamp > self.last:
            self.last, self.passed = stamp, 0
        self.passed += stamp == self.last
        return text


class PodLog(threading.Thread):
    """Follows a pod's container until it has ended, or `stop` is called."""

    def __init__(self, core: Callable[[], client.CoreV1Api], namespace: str, pod: str, container: str,
                 show: Callable[[str], None]) -> None:  # fmt: skip
        super().__init__(name=f"log of {pod}", daemon=True)
        self._core, self._container, self._show = core, container, show
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        self._once = LineDeduplicator()
        self._surprised = False
        self._ended = threading.Event()
        self._restarts = 0
        self.restarts = 0
        """Of the container, as its pod's status says; set from outside."""

    def end(self) -> None:
        """No more lines will come: stop when what there is has been read."""
        self._ended.set()

    def run(self) -> None:
        broken = 0  # times that the last reading was cut short without a new line
        while broken < LAST_TRIES:
            last_round = self._ended.is_set()  # asked before reading, so that nothing after it is missed
            if self.restarts > self._restarts:  # the container died while nobody read
                self._read("previous")
                self._restarts = self.restarts
            shown = self._once.last, self._once.passed
            whole = self._read(*([] if last_round else ["follow"]))
            if last_round and whole:
                return
            if not last_round:
                self._ended.wait(RETRY_SECONDS)
            elif shown == (self._once.last, self._once.passed):
                broken += 1
                time.sleep(RETRY_SECONDS / 4)

    def _read(self, *how: str) -> bool:
        """Pass on what is new, with `follow` or of the `previous` container; whether the log was read to its end."""
        query = [("container", self._container), ("timestamps", "true"), *((name, "true") for name in how)]
        if self._once.last:  # kubernetes' own function has only sinceSeconds, for which clocks would have to agree
            last = datetime.fromtimestamp(self._once.last // 10**9, UTC)
            query.append(("sinceTime", last.isoformat().replace("+00:00", "Z")))
        self._once.restart()
        rest = b""
        try:
            response = self._core().api_client.call_api(
                self._path, "GET", query_params=query, auth_settings=["BearerToken"], _return_http_data_only=True,
                _preload_content=False, _request_timeout=(10, READ_SECONDS),
            )  # fmt: skip
            for chunk in response.stream(1 << 16):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._pass(line)
            if rest:
                self._pass(rest)
        except (client.ApiException, HTTPError, OSError):
            return False  # no container yet, a broken connection, a server in trouble: read again from the last line
        except Exception as error:  # the job is worth more than its log, but nobody shall miss lines unknowingly
            if not self._surprised:
                log.warning("train: reading the %s failed, lines may be missing (%s: %s)", self.name,
                            type(error).__name__, " ".join(str(error).split())[:200])  # fmt: skip
            self._surprised = True
            return False
        return True

    def _pass(self, line: bytes) -> None:
        text = self._once(line.decode(errors="backslashreplace"))
        if text is not None:
            self._show(text)
