"""Bring bytes here over a network that fails, onto a disk that may be too small.

Bytes are received into `DIRECTORY.partial` and published by rename with a manifest. A partial file
survives a lost connection and a killed process; the next attempt goes on from its end, but only
when the source still serves the same version (ETag, commit).
"""

import errno
import math
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path
from typing import Any, TypeVar

import botocore.exceptions
import httpx2
import requests
import tenacity
import urllib3.exceptions
from huggingface_hub import errors as hub_errors
from tqdm import tqdm

from tailtune.errors import UserError
from tailtune.log import log
from tailtune.manifest import partial_directory, publish, read_json, sha256_file, write_json

ATTEMPTS = 5
RETRY_WAIT_SECONDS = 1.0
"""First wait between two attempts; it doubles, with jitter."""
PROGRESS_SECONDS = 10.0

STATE = ".fetch.json"
"""In a partial directory: what the bytes beside it belong to."""

TOKEN = "HF_TOKEN (a variable, or a mounted file that HF_TOKEN_PATH names)"
S3_REMEDY = (
    "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, or mount the data connection's "
    "secret and name it in TAILTUNE_S3_SECRET_DIR; check the bucket's policy"
)

T = TypeVar("T")


@dataclass(frozen=True)
class Body:
    offset: int
    """Where the chunks start: the offset that was asked for, or 0 when the source starts again."""
    total_bytes: int | None
    version: str | None
    """ETag, or another mark that changes with the content; None forbids to resume."""
    chunks: Iterator[bytes]


@dataclass(frozen=True)
class Origin:
    name: str
    open: Callable[[int, str | None], AbstractContextManager[Body]]
    """From (offset, the version that the bytes before it have)."""
    revision: str | None = None
    sha256: str | None = None


class Interrupted(Exception):
    """The transfer failed in a way that may pass; what has arrived is kept."""


class GaveUp(Interrupted):
    """The same after a client's own retries: not attempted again."""


@contextmanager
def complete_or_absent(
    directory: Path, key: Mapping[str, Any], facts: dict[str, Any], shown: str, endpoint: str
) -> Iterator[tuple[Path, dict[str, str]]]:
    """`publish` that explains the clients' and the disk's errors as UserErrors that say what to do.

    Yields the partial directory, which stays where the next attempt can go on from it, and the hashes
    of its files by name, to be filled in as far as they are known.
    """
    partial = partial_directory(directory)
    known_sha256: dict[str, str] = {}
    try:
        with publish(directory, key, facts, keep_partial=True, known_sha256=known_sha256):
            yield partial, known_sha256
            (partial / STATE).unlink()
    except Exception as error:
        if problem := _client_problem(error, shown, endpoint):
            raise UserError(problem) from None
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(partial, ignore_errors=True)
            free = shutil.disk_usage(directory.parent).free
            needed = facts.get("bytes", 0)
            raise UserError(f"no space in {directory.parent}: {needed:,} bytes are needed, {free:,} bytes "
                            "are free; free some, or take a larger volume") from None  # fmt: skip
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"cannot read or write {error.filename or directory} ({error.strerror}); check "
                            "the volume's access mode and the permissions") from None  # fmt: skip
        raise
    finally:
        if not _num_bytes(partial):
            shutil.rmtree(partial, ignore_errors=True)


def receive(
    origin: Origin, partial: Path, key: Mapping[str, Any], facts: dict[str, Any], sha256: str | None, shown: str
) -> None:
    """Bring `partial/NAME` here, whole and checked; fill `facts` in."""
    part = partial / f"{origin.name}.part"
    retry(bind(_receive_rest, origin, part, key, facts))
    found = sha256_file(part)
    problem = None
    if _num_bytes(part) == 0:
        problem = f"{shown} is empty (0 bytes); give a file with data"
    elif sha256 and found != sha256:
        problem = f"{shown} has sha256 {found}, expected {sha256}; correct data.sha256 or restore the file"
    elif origin.sha256 and found != origin.sha256:
        problem = f"{shown} arrived with sha256 {found}, the hub says {origin.sha256}; run the step again"
    if problem:
        empty(partial)
        raise UserError(problem)
    facts |= {"bytes": _num_bytes(part), "sha256": found, "file": origin.name}
    part.rename(partial / origin.name)


def _receive_rest(origin: Origin, part: Path, key: Mapping[str, Any], facts: dict[str, Any]) -> None:
    """Bring `part` to its full length, going on from what is there where that is safe."""
    partial = part.parent
    identity = {"key": key, "revision": origin.revision, "name": origin.name}
    state = keep_if(partial, identity)
    have, total, version = _num_bytes(part), state.get("bytes"), state.get("version")
    if have and have == total:
        facts |= {"bytes": have, "revision": origin.revision or _etag(version)}
        return
    resumable = version and total and have < total
    with origin.open(have if resumable else 0, version) as body:
        facts |= {"bytes": body.total_bytes or 0, "revision": origin.revision or _etag(body.version)}
        if body.offset == 0:
            part.unlink(missing_ok=True)
            state = {"identity": identity, "version": body.version, "bytes": body.total_bytes}
            write_json(partial / STATE, state)
        else:
            log.info("fetch: %s: going on at byte %s", origin.name, f"{body.offset:,}")
        check_space(partial, body.total_bytes or 0)
        bar = Bar(total=body.total_bytes, initial=body.offset, desc=origin.name, unit="B", unit_scale=True)
        with part.open("ab") as file, bar, logged_growth(partial, body.total_bytes):
            for chunk in body.chunks:
                file.write(chunk)
                bar.update(len(chunk))
    if body.total_bytes is not None and _num_bytes(part) != body.total_bytes:
        raise Interrupted(f"{_num_bytes(part):,} of {body.total_bytes:,} bytes arrived")


def _etag(version: str | None) -> str | None:
    return version.strip('"') if version and version.startswith('"') else None


# --- the partial directory, the disk and how they fill ---------------------------------------------


def keep_if(partial: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what lies in `partial` if it was received for `identity`; otherwise start it anew."""
    state: dict[str, Any] = read_json(partial / STATE) or {}
    if state.get("identity") != identity:
        empty(partial)
        state = {"identity": identity}
        write_json(partial / STATE, state)
    return state


def empty(partial: Path) -> None:
    shutil.rmtree(partial)
    partial.mkdir()


def check_space(partial: Path, total_bytes: int) -> None:
    """What a full disk would raise on the way, raised before the way."""
    if total_bytes - _num_bytes(partial) > shutil.disk_usage(partial).free:
        raise OSError(errno.ENOSPC, "No space left on device")


def _num_bytes(path: Path) -> int:
    """Bytes of a file, or of all that was received below a directory; 0 when there is none."""
    total = 0
    for file in [path, *path.rglob("*")]:
        with suppress(FileNotFoundError):  # renamed by the transfer meanwhile
            total += file.stat().st_size if file.is_file() and file.name != STATE else 0
    return total


class Bar(tqdm):
    """A progress bar, on a terminal only. In other logs `logged_growth` writes lines."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "disable": None})


@contextmanager
def logged_growth(directory: Path, total_bytes: int | None) -> Iterator[None]:
    """A plain line every few seconds for logs that are no terminal; a terminal has bars."""
    done = threading.Event()

    def watch() -> None:
        while not sys.stderr.isatty() and not done.wait(PROGRESS_SECONDS):
            total = f"{total_bytes:,}" if total_bytes else "unknown"
            log.info("fetch: %s of %s bytes", f"{_num_bytes(directory):,}", total)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


# --- attempts --------------------------------------------------------------------------------------

_NETWORK_ERRORS = (
    Interrupted, ConnectionError, TimeoutError, requests.ConnectionError, requests.Timeout,
    urllib3.exceptions.HTTPError, httpx2.TransportError,
    botocore.exceptions.ConnectionError, botocore.exceptions.HTTPClientError,
    hub_errors.LocalEntryNotFoundError,  # what hf_hub_download makes of an unreachable hub
)  # fmt: skip


def retry(call: Callable[[], T], *, give_up_seconds: float = math.inf) -> T:
    """`call()`, in up to ATTEMPTS attempts, of which none starts after `give_up_seconds`."""

    def announce(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait = state.next_action.sleep if state.next_action else 0
        now = state.attempt_number
        log.info("fetch: attempt %d of %d: %s; again in %.1f s", now, ATTEMPTS, _reason(error), wait)

    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS) | tenacity.stop_before_delay(give_up_seconds),
        wait=tenacity.wait_exponential_jitter(multiplier=RETRY_WAIT_SECONDS, jitter=RETRY_WAIT_SECONDS),
        retry=tenacity.retry_if_exception(_is_transient),
        before_sleep=announce,
        reraise=True,
    )(call)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, GaveUp | hub_errors.OfflineModeIsEnabled):
        return False
    if isinstance(error, hub_errors.HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    if type(error) is OSError and error.errno is None:
        return True  # huggingface_hub's check of a file's size
    if isinstance(error, OSError) and error.errno in (errno.EREMOTEIO, errno.EBUSY):
        return True  # what s3fs makes of 500, of 503 and of an object that was replaced meanwhile
    return isinstance(error, _NETWORK_ERRORS)


# --- errors in one line ----------------------------------------------------------------------------


def _client_problem(error: Exception, shown: str, endpoint: str) -> str | None:
    """What a client's exception means and what to do about it; None for any other exception."""
    if isinstance(error, hub_errors.HfHubHTTPError):
        return f"{shown} {_hub_problem(error, endpoint)}"
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        remedy = "unset it for this step, or give a local path"
        return f"{shown} cannot be fetched while HF_HUB_OFFLINE is set; {remedy}"
    if isinstance(error, hub_errors.HFValidationError):
        return f"{shown} is no name on the hub; write OWNER/NAME, or a local path"
    if isinstance(error, _NETWORK_ERRORS):
        at = f" ({endpoint})" if shown.startswith(("hf://", "model ")) else ""
        return (
            f"{shown}{at} could not be fetched: {_reason(error)}; check the network, the proxy and the "
            "address and run the step again, which goes on from what arrived; without a network, give "
            "base_model or data_source a local path"
        )
    if isinstance(error, requests.RequestException):
        return f"{shown} cannot be fetched: {_reason(error)}; check the address"
    if isinstance(error, botocore.exceptions.BotoCoreError):
        return f"{shown}: {_reason(error)}; {S3_REMEDY}"
    # s3fs raises bare PermissionErrors; those of the disk have a number.
    refused = isinstance(error, PermissionError) and error.errno is None
    if refused or (isinstance(error, OSError) and isinstance(error.__cause__, botocore.exceptions.ClientError)):
        return f"{shown}: S3 refused: {error.__cause__ or error}; {S3_REMEDY}"
    return None


def _hub_problem(error: hub_errors.HfHubHTTPError, endpoint: str) -> str:
    status = error.response.status_code
    if isinstance(error, hub_errors.GatedRepoError):
        page = str(error.response.url).partition("/resolve/")[0]
        return f"is gated: accept its licence at {page}, then set {TOKEN} to a token of that account"
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        return f"is not on the hub ({endpoint}), or private: check the name; for a private one set {TOKEN}"
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return "has no such revision on the hub; check the branch, tag or commit"
    if isinstance(error, hub_errors.RemoteEntryNotFoundError):
        return "has no such file on the hub; check the file's name after the dataset's"
    if status in (401, 403):
        return f"is refused by the hub ({endpoint} answered {status}); check {TOKEN} and what it may read"
    return f"cannot be fetched: {endpoint} answered {status}; run the step again later, or give a local path"


def _reason(error: BaseException | None) -> str:
    """The innermost cause in one line. The outer ones of requests spell out the address with its query."""
    while error is not None:
        inner = getattr(error, "reason", None) or (error.args[0] if error.args else None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    first = error.args[0] if error and error.args else None
    text = ((first if isinstance(first, str) else str(error)).strip().splitlines() or [""])[0]
    return text if isinstance(error, Interrupted) else f"{type(error).__name__}: {text}"
