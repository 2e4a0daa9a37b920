"""Receive bytes over a network that may fail, onto a disk that may be too small.

Bytes are received into `DIRECTORY.partial`, which is published by rename with a manifest. A partial file
survives a lost connection and a killed process. The next attempt resumes at its end, but only if the
source still serves the same version (ETag, commit).
"""

import errno
import math
import os
import re
import shutil
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import botocore.exceptions
import httpx2
import requests
import urllib3.exceptions
from huggingface_hub import errors as hub_errors

from tailtune.errors import UserError
from tailtune.files import free_bytes, read_json, sha256_file, write_json
from tailtune.log import log
from tailtune.manifest import partial_directory, publish
from tailtune.parquet.lines import WEB_PAGE
from tailtune.progress import Progress
from tailtune.recipe.schema import without_secrets
from tailtune.retry import TEMPORARY_STATUSES, retry

ATTEMPTS = 5
RETRY_WAIT_SECONDS = 2.0
"""Maximum wait after the first attempt, doubled after each further one. Waits are random, half of it on average."""

STATE = ".fetch.json"
"""File in a partial directory that records which version of which source its bytes belong to."""

TOKEN = "HF_TOKEN (a variable, or a mounted file that HF_TOKEN_PATH names)"
S3_REMEDY = (
    "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, or mount the data connection's "
    "secret and name it in TAILTUNE_S3_SECRET_DIR; check the bucket's policy"
)

Result = TypeVar("Result")
ENDPOINT = re.compile(r"https?://([^@/\s]+@)?([\w-]{1,63}(\.[\w-]{1,63})*|\[[\da-fA-F:.]+\])(:\d{1,5})?(/[!-~]*)?")


@dataclass(frozen=True)
class Body:
    offset: int
    """Where the chunks start: at the requested offset, or at 0 when the source cannot resume."""
    total_bytes: int | None
    version: str | None
    """ETag, or another value that changes with the content; None: never resume."""
    chunks: Iterator[bytes]


@dataclass(frozen=True)
class Origin:
    name: str
    """Of the file that is received."""
    shown: str
    """The source in messages, without secrets."""
    open: Callable[[int, str | None], AbstractContextManager[Body]]
    """Takes the offset to start at, and the version of the bytes before it."""
    revision: str | None = None
    sha256: str | None = None


class Interrupted(Exception):
    """The transfer failed, perhaps only temporarily; what has arrived is kept."""


class GaveUp(Interrupted):
    """The same after a client's own retries; not retried."""


@contextmanager
def complete_or_absent(
    directory: Path, key: Mapping[str, Any], facts: dict[str, Any], shown: str, endpoint: str
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Publish `directory`, and turn errors of the clients and the disk into UserErrors that say what to do.

    Yields the partial directory, which is kept if the next attempt can resume from it, and a dictionary of
    the SHA-256 of its files by name, for the caller to fill as far as they are known.
    """
    partial_dir = partial_directory(directory)
    known_sha256: dict[str, str] = {}
    try:
        with (
            errors_named(shown, endpoint),
            publish(directory, key, facts, keep_partial=True, known_sha256=known_sha256),
        ):
            yield partial_dir, known_sha256
            (partial_dir / STATE).unlink()
    finally:
        if not _num_bytes(partial_dir):
            shutil.rmtree(partial_dir, ignore_errors=True)


@contextmanager
def errors_named(shown: str, endpoint: str) -> Iterator[None]:
    """Turn errors of the clients within the block into UserErrors that say what to do."""
    try:
        yield
    except Exception as error:
        if user_error := _client_error(error, shown, endpoint):
            raise user_error from None
        raise


def receive(origin: Origin, partial_dir: Path, facts: dict[str, Any], sha256: str | None) -> None:
    """Receive the whole of `origin` into `partial_dir`, check it, and fill in its `facts`. Raises UserError.

    What an earlier attempt has received is kept if it belongs to the same origins, which `keep_if_same` has checked,
    and to the version that the source still serves.
    """
    final, part = partial_dir / origin.name, partial_dir / f"{origin.name}.part"
    if final.exists():
        final.rename(part)
    call_with_retries(partial(_receive_rest, origin, part, facts))
    actual, shown = sha256_file(part), origin.shown
    error = None
    if _num_bytes(part) == 0:
        error = UserError(f"{shown} is empty (0 bytes)", "give a file with data")
    elif sha256 and actual != sha256:
        error = UserError(f"{shown} has sha256 {actual}, expected {sha256}", "correct data.sha256 or restore the file")
    elif origin.sha256 and actual != origin.sha256:
        error = UserError(f"{shown} arrived with sha256 {actual}, the hub says {origin.sha256}", "run the step again")
    if error:
        part.unlink()
        raise error
    facts |= {"bytes": _num_bytes(part), "sha256": actual, "file": origin.name}
    part.rename(final)


def _receive_rest(origin: Origin, part: Path, facts: dict[str, Any]) -> None:
    """Make one attempt to complete `part`; it resumes what an earlier one received where that is safe."""
    states = _read_state(part.parent)
    state = states.get("files", {}).get(origin.name, {})
    received, total, version = _num_bytes(part), state.get("bytes"), state.get("version")
    complete = received > 0 and received == total
    if complete and origin.revision:
        facts |= {"bytes": received, "revision": origin.revision}
        return
    resumable = version and total and received < total
    with origin.open(received if resumable else 0, version) as body:
        facts |= {"bytes": body.total_bytes or 0, "revision": origin.revision or _etag(body.version)}
        if complete and version and version == body.version:
            return
        if body.offset == 0:
            part.unlink(missing_ok=True)
            files = states.get("files", {}) | {origin.name: {"version": body.version, "bytes": body.total_bytes}}
            write_json(part.parent / STATE, {**states, "files": files})
        else:
            log.info("fetch: %s: resuming at byte %s", origin.name, f"{body.offset:,}")
        check_space(part, body.total_bytes or 0)
        progress = Progress(f"fetch: {origin.name}", body.total_bytes, "bytes", done=body.offset)
        with part.open("ab") as file, progress:
            for chunk in body.chunks:
                if file.tell() == 0 and "://" in origin.shown and WEB_PAGE.match(chunk):
                    raise web_page(origin.shown)
                file.write(chunk)
                progress.update(len(chunk))
    if body.total_bytes is not None and _num_bytes(part) != body.total_bytes:
        raise Interrupted(f"{_num_bytes(part):,} of {body.total_bytes:,} bytes arrived")


def web_page(shown: str) -> UserError:
    """The error for what a server sends in place of a file."""
    remedy = "use the link that downloads the file; with a login: a signed link (docs/data.md), s3:// or a path"
    return UserError(f"{shown} is a web page, not a data file", remedy)


def _etag(version: str | None) -> str | None:
    """Return the version if it is an ETag (it may be a date), without its quotes."""
    return version.strip('"') if version and version.startswith('"') else None


# --- the partial directory, disk space -------------------------------------------------------------


def keep_if_same(partial_dir: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a partial directory; empty the directory if it was received for another `identity`."""
    state = _read_state(partial_dir)
    if state.get("identity") != identity:
        empty(partial_dir)
        state = {"identity": identity}
        write_json(partial_dir / STATE, state)
    return state


def _read_state(partial_dir: Path) -> dict[str, Any]:
    state = read_json(partial_dir / STATE)
    return state if isinstance(state, dict) else {}


def empty(partial_dir: Path) -> None:
    """Delete everything in a partial directory."""
    shutil.rmtree(partial_dir)
    partial_dir.mkdir()


def check_space(path: Path, total_bytes: int) -> None:
    """Raise before the transfer of a file or directory the OSError that a full disk would raise during it."""
    if total_bytes - _num_bytes(path) > free_bytes(path):
        raise OSError(errno.ENOSPC, "No space left on device")


def _num_bytes(path: Path) -> int:
    """Return the size of a file, or of everything received below a directory; 0 if there is none."""
    total = 0
    for file in [path, *path.rglob("*")]:
        with suppress(FileNotFoundError):  # renamed by the transfer meanwhile
            total += file.stat().st_size if file.is_file() and file.name != STATE else 0
    return total


def growth(directory: Path, total_bytes: int, shown: str) -> Progress:
    """Return the progress of a client that fills a directory and is not seen to receive."""

    def measure() -> int:
        return min(_num_bytes(directory), total_bytes)  # the hub's client has small files of its own there

    return Progress(f"fetch: {shown}", total_bytes, "bytes", done=measure(), measure=measure)


# --- attempts --------------------------------------------------------------------------------------

_NETWORK_ERRORS = (
    Interrupted, ConnectionError, TimeoutError, requests.ConnectionError, requests.Timeout,
    urllib3.exceptions.HTTPError, httpx2.TransportError,
    botocore.exceptions.ConnectionError, botocore.exceptions.HTTPClientError,
    hub_errors.LocalEntryNotFoundError,  # raised by hf_hub_download when the hub cannot be reached
)  # fmt: skip


def call_with_retries(function: Callable[[], Result], *, give_up_seconds: float = math.inf) -> Result:
    """Return `function()`, called in up to ATTEMPTS attempts, none of which starts after `give_up_seconds`."""

    def log_attempt(error: BaseException, attempt: int, wait_seconds: float) -> None:
        log.info("fetch: attempt %d of %d: %s; again in %.1f s", attempt, ATTEMPTS, _reason(error), wait_seconds)

    return retry(
        function,
        is_temporary=_is_temporary,
        seconds=give_up_seconds,
        attempts=ATTEMPTS,
        first_wait_seconds=RETRY_WAIT_SECONDS,
        on_retry=log_attempt,
    )


def is_temporary_status(status: int) -> bool:
    """Return whether a request may succeed after this HTTP status; proxies add statuses of their own above 504."""
    return status in TEMPORARY_STATUSES or status >= 500


def _is_temporary(error: BaseException) -> bool:
    if isinstance(error, GaveUp | hub_errors.OfflineModeIsEnabled):
        return False
    if isinstance(error, hub_errors.HfHubHTTPError):
        return is_temporary_status(error.response.status_code)
    if _tls_error(error):
        return False
    if type(error) is OSError and error.errno is None:
        return True  # raised by huggingface_hub when a file has the wrong size
    if isinstance(error, OSError) and error.errno in (errno.EREMOTEIO, errno.EBUSY):
        return True  # what s3fs raises for 500, 503, and an object that was replaced meanwhile
    return isinstance(error, _NETWORK_ERRORS)


def check_endpoint(variable: str, address: str) -> None:
    """Raise UserError when the address of a server is none."""
    if not ENDPOINT.fullmatch(address):
        raise UserError(
            f"{variable} is '{without_secrets(address)[:100]}', which is no address", "write https://HOST[:PORT]"
        )


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """Return the TLS error behind a client's, unless it is a lost connection."""
    for _ in range(20):  # an error may be among its own causes
        if error is None or isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
            return None
        if isinstance(error, ssl.SSLError):
            return error
        inner = getattr(error, "reason", None) or (error.args[0] if error.args else None)
        error = inner if isinstance(inner, BaseException) else error.__cause__ or error.__context__
    return None


# --- errors in one line ----------------------------------------------------------------------------


def _client_error(error: Exception, shown: str, endpoint: str) -> UserError | None:
    """Return what a client's exception means and what to do about it; None for any other exception."""
    if isinstance(error, hub_errors.HfHubHTTPError):
        return _hub_error(error, shown, endpoint)
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        remedy = "unset it for this step, or give a local path"
        return UserError(f"{shown} cannot be fetched while HF_HUB_OFFLINE is set", remedy)
    if isinstance(error, hub_errors.HFValidationError):
        return UserError(f"{shown} is not a valid hub name", "write OWNER/NAME, or a local path")
    if tls_error := _tls_error(error):
        problem = f"{shown} could not be fetched: {_reason(tls_error)}"
        if isinstance(tls_error, ssl.SSLCertVerificationError):
            problem = f"{shown} could not be fetched: the certificate is not trusted ({tls_error.verify_message})"
            now = f", which is now {path}" if (path := os.environ.get("TAILTUNE_CA_FILE")) else ""
            return UserError(problem, f"name the organisation's certificates, a PEM file, in TAILTUNE_CA_FILE{now}")
        return UserError(problem, "check whether the address begins with https:// or http://, and the proxy")
    if isinstance(error, _NETWORK_ERRORS):
        at = f" ({endpoint})" if shown.startswith(("hf://", "model ")) else ""
        return UserError(
            f"{shown}{at} could not be fetched: {_reason(error)}",
            "check the network, the proxy and the address and run the step again, which resumes from what has "
            "arrived; without a network, give base_model or data_source a local path",
        )
    if isinstance(error, requests.RequestException | httpx2.RequestError) or (
        type(error) is OSError and error.errno is None
    ):
        return UserError(f"{shown} cannot be fetched: {_reason(error)}", "check the address")
    if isinstance(error, botocore.exceptions.BotoCoreError):
        return UserError(f"{shown}: {_reason(error)}", S3_REMEDY)
    # s3fs raises PermissionErrors without an errno; those of the disk have one.
    refused = isinstance(error, PermissionError) and error.errno is None
    if refused or (isinstance(error, OSError) and isinstance(error.__cause__, botocore.exceptions.ClientError)):
        return UserError(f"{shown}: S3 refused: {error.__cause__ or error}", S3_REMEDY)
    return None


def _hub_error(error: hub_errors.HfHubHTTPError, shown: str, endpoint: str) -> UserError:
    """Return what the hub's answer means and what to do about it."""
    status = error.response.status_code
    if isinstance(error, hub_errors.GatedRepoError):
        page = str(error.response.url).partition("/resolve/")[0]
        return UserError(f"{shown} is gated: accept its licence at {page}, then set {TOKEN} to a token of that account")
    if isinstance(error, hub_errors.RepositoryNotFoundError):
        problem = f"{shown} is not on the hub ({endpoint}), or private: check the name"
        return UserError(problem, f"for a private one set {TOKEN}")
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return UserError(f"{shown} has no such revision on the hub", "check the branch, tag or commit")
    if isinstance(error, hub_errors.RemoteEntryNotFoundError):
        return UserError(f"{shown} has no such file on the hub", "check the file's name after the dataset's")
    if status in (401, 403):
        problem = f"{shown} is refused by the hub ({endpoint} answered {status})"
        return UserError(problem, f"check {TOKEN} and what it may read")
    problem = f"{shown} cannot be fetched: {endpoint} answered {status}"
    return UserError(problem, "run the step again later, or give a local path")


def _reason(error: BaseException | None) -> str:
    """Return the innermost cause in one line. The outer ones of requests contain the address with its query."""
    while error is not None:
        inner = getattr(error, "reason", None) or (error.args[0] if error.args else None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    first = error.args[0] if error and error.args else None
    text = ((first if isinstance(first, str) else str(error)).strip().splitlines() or [""])[0]
    return text if isinstance(error, Interrupted) else f"{type(error).__name__}: {text}"
