"""Fetch the data file and the base model, once, complete or not at all.

Bytes are received into `DIRECTORY.partial` and published by rename with a manifest. A partial file
survives a lost connection and a killed process; the next attempt goes on from its end, but only
when the source still serves the same version (ETag, commit). Data files on the hub are received
here too and not by `hf_hub_download`, which since version 2 deletes a file that it did not finish.
"""

import errno
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial as bind
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import botocore.exceptions
import httpx2
import huggingface_hub as hub
import requests
import tenacity
import urllib3.exceptions
from huggingface_hub import errors as hub_errors
from tqdm import tqdm

from tailtune.errors import UserError
from tailtune.log import log
from tailtune.manifest import (
    MANIFEST,
    partial_directory,
    publish,
    read_manifest,
    sha256_file,
    sha256_json,
    write_json,
)

ATTEMPTS = 5
RETRY_WAIT_SECONDS = 1.0
"""First wait between two attempts; it doubles, with jitter."""
TIMEOUT_SECONDS = 60.0
PROGRESS_SECONDS = 10.0
CHUNK_BYTES = 8 * 2**20

DATA_FILE = re.compile(r"\.(json|jsonl|csv|txt|parquet)(\.gz|\.zst)?$", re.IGNORECASE)
NO_DATA = {"dataset_infos.json", "license.txt", "requirements.txt"}
MODEL_FILE = re.compile(
    r"(?!consolidated)[^/]+\.(json|safetensors|txt|model|tiktoken|jinja)"  # not Mistral's second copy
    r"|additional_chat_templates/[^/]+\.jinja"
    r"|(LICENSE|NOTICE|USE_POLICY)[^/]*"
)
STATE = ".fetch.json"
"""In a partial directory: what the bytes beside it belong to."""

TOKEN = "HF_TOKEN (a variable, or a mounted file that HF_TOKEN_PATH names)"
S3_REMEDY = (
    "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, or mount the data connection's "
    "secret and name it in TAILTUNE_S3_SECRET_DIR; check the bucket's policy"
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Fetched:
    path: Path
    """The data file under its final name."""
    source: str
    revision: str | None
    """The resolved commit of `hf://`, otherwise the server's ETag, if it gave one."""
    bytes: int
    sha256: str
    reused: bool
    """Whether a complete earlier fetch was found; then no file was touched."""


@dataclass(frozen=True)
class _Environment:
    embedded_dir: Path
    hub: str
    s3: Mapping[str, Any]
    """Arguments of S3FileSystem; what is absent botocore finds by its own rules (variables, roles)."""


def _environment() -> _Environment:
    """Every environment variable that this module reads. The hub's token is read by huggingface_hub."""
    secret = os.environ.get("TAILTUNE_S3_SECRET_DIR")
    if secret and not Path(secret).is_dir():
        raise UserError(f"TAILTUNE_S3_SECRET_DIR is {secret}, which is no directory; mount the secret there")
    # The names are the keys of an OpenShift AI data connection, as variables or as a mounted secret.
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_S3_ENDPOINT", "AWS_DEFAULT_REGION")
    files = [Path(secret) / name for name in names] if secret else []
    mounted = {file.name: file.read_text().strip() for file in files if file.is_file()}
    endpoint = mounted.get("AWS_S3_ENDPOINT") or os.environ.get("AWS_ENDPOINT_URL")
    endpoint = endpoint or os.environ.get("AWS_S3_ENDPOINT")
    if endpoint and "://" not in endpoint:
        endpoint = f"https://{endpoint}"
    region = mounted.get("AWS_DEFAULT_REGION")
    s3 = {"key": mounted.get("AWS_ACCESS_KEY_ID"), "secret": mounted.get("AWS_SECRET_ACCESS_KEY"),
          "endpoint_url": endpoint, "client_kwargs": {"region_name": region} if region else None}  # fmt: skip
    return _Environment(
        embedded_dir=Path(os.environ.get("TAILTUNE_EMBEDDED_DIR", "/opt/tailtune/data")),
        hub=(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/"),
        s3={name: value for name, value in s3.items() if value},
    )


@dataclass(frozen=True)
class _Body:
    offset: int
    """Where the chunks start: the offset that was asked for, or 0 when the source starts again."""
    total_bytes: int | None
    version: str | None
    """ETag, or another mark that changes with the content; None forbids to resume."""
    chunks: Iterator[bytes]

    @property
    def etag(self) -> str | None:
        return self.version.strip('"') if self.version and self.version.startswith('"') else None


@dataclass(frozen=True)
class _Origin:
    name: str
    open: Callable[[int, str | None], AbstractContextManager[_Body]]
    """From (offset, the version that the bytes before it have)."""
    revision: str | None = None
    sha256: str | None = None


class _Interrupted(Exception):
    """The transfer failed in a way that may pass; what has arrived is kept."""


class _Bar(tqdm):  # type: ignore[misc]
    """A progress bar, on a terminal only. In other logs `_logged_growth` writes lines."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "disable": None})


def fetch_dataset(source: str, directory: Path, *, sha256: str | None = None) -> Fetched:
    """Fetch one data file into `directory`, or find that it is there.

    `source` is `hf://datasets/OWNER/NAME[@revision][/file]`, `https://…`, `s3://BUCKET/KEY`, a path,
    or `embedded`, the file in the image. A branch is resolved once: the commit is recorded and kept.
    `sha256` is the expected content. Raises UserError.
    """
    environment = _environment()
    shown = _without_secrets(source)
    local = _local_file(source, environment.embedded_dir)
    # The digest tells addresses apart whose query, often a signature, must not be written down.
    key: dict[str, Any] = {"source": shown, "source_sha256": sha256_json(source), "sha256": sha256}
    if local:
        key |= {"bytes": local.stat().st_size, "mtime_ns": local.stat().st_mtime_ns}
    if manifest := read_manifest(directory, key):
        log.info("fetch: %s is here already: %s", shown, directory)
        return _fetched(directory, manifest["facts"], reused=True)
    facts: dict[str, Any] = {"source": shown}
    with _published(directory, key, facts) as partial, _one_line(shown, environment.hub):
        origin = _local_origin(local) if local else _remote_origin(source, environment)
        _retry(bind(_receive, origin, partial, key, facts))
        _finish(origin, partial, sha256, facts, shown)
    log.info("fetch: %s: %s bytes, sha256 %s", shown, f"{facts['bytes']:,}", facts["sha256"])
    return _fetched(directory, facts, reused=False)


def fetch_model(name: str, directory: Path, *, revision: str = "main") -> Path:
    """Fetch a hub model (configuration, tokenizer, chat template, safetensors) into `directory`.

    The commit is resolved once, recorded, and kept. Files that an interrupted attempt finished are
    not received again. Returns `directory`. Raises UserError.
    """
    key = {"model": name, "revision": revision}
    shown = f"model {name}"
    if read_manifest(directory, key):
        log.info("fetch: %s is here already: %s", shown, directory)
        return directory
    facts: dict[str, Any] = {"source": f"hf://{name}"}
    endpoint = _environment().hub
    with _published(directory, key, facts) as partial, _one_line(shown, endpoint):
        api = hub.HfApi(endpoint=endpoint)
        ask = bind(api.model_info, name, revision=revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
        info = _retry(ask)
        files = _model_files(info.siblings or [], shown)
        facts |= {"revision": info.sha, "bytes": sum(file.size or 0 for file in files)}
        log.info("fetch: %s: %s is commit %s, %s bytes", shown, revision, info.sha, f"{facts['bytes']:,}")
        _keep_if(partial, {"key": key, "revision": info.sha})
        _check_space(partial, facts["bytes"])
        with _logged_growth(partial, facts["bytes"]):
            _retry(bind(_snapshot, api, name, str(info.sha), partial, files))
        _check_weights(partial, files, shown)
        shutil.rmtree(partial / ".cache", ignore_errors=True)
        (partial / STATE).unlink()
    return directory


# --- where a source is -----------------------------------------------------------------------------


def _local_file(source: str, embedded_dir: Path) -> Path | None:
    """The file behind `embedded` or a path; None for an address."""
    if source == "embedded":
        return _embedded_file(embedded_dir)
    if "://" in source:
        return None
    path = Path(source).expanduser()
    if path.is_dir():
        raise UserError(f"data source {path} is a directory; name one file in it")
    if not path.is_file():
        raise UserError(f"data source {path} does not exist; give the path of a file as this step sees it, "
                        "hf://datasets/OWNER/NAME, https://…, s3://BUCKET/KEY or 'embedded'")  # fmt: skip
    return path


def _embedded_file(directory: Path) -> Path:
    entries = sorted(directory.iterdir()) if directory.is_dir() else []
    found = [path for path in entries if path.is_file() and _is_data_file(path.name)]
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:10]) or "none"
        raise UserError(
            f"source 'embedded' needs exactly one data file in {directory}, found {len(found)} ({names});"
            " build the image with one, or set TAILTUNE_EMBEDDED_DIR"
        )
    return found[0]


def _is_data_file(name: str) -> bool:
    return bool(DATA_FILE.search(name)) and name.rsplit("/", 1)[-1].lower() not in NO_DATA


def _remote_origin(source: str, environment: _Environment) -> _Origin:
    scheme = source.partition("://")[0]
    if scheme in ("http", "https"):
        name = _file_name(unquote(urlsplit(source).path))
        return _Origin(name, bind(_open_http, source, {}))
    if scheme == "s3":
        path = source.removeprefix("s3://").strip("/")
        if "/" not in path:
            raise UserError(f"{source} names no object; write s3://BUCKET/KEY")
        return _Origin(_file_name(path), bind(_open_s3, path, environment.s3))
    if scheme == "hf":
        return _hub_origin(source, environment.hub)
    raise UserError(f"data source {_without_secrets(source)}: '{scheme}://' is not supported; use "
                    "hf://datasets/…, https://, s3://, a path or 'embedded'")  # fmt: skip


def _hub_origin(source: str, endpoint: str) -> _Origin:
    try:
        uri = hub.parse_hf_uri(source)
    except hub_errors.HfUriError as error:
        raise UserError(f"{error.args[0].strip()} Write hf://datasets/OWNER/NAME[@revision][/file]") from None
    if uri.type != "dataset":
        raise UserError(f"{source} is no dataset; write hf://datasets/OWNER/NAME[@revision][/file]")
    api = hub.HfApi(endpoint=endpoint)
    ask = bind(api.dataset_info, uri.id, revision=uri.revision, files_metadata=True, timeout=TIMEOUT_SECONDS)
    info = _retry(ask)
    log.info("fetch: %s: %s is commit %s", source, uri.revision or "main", info.sha)
    files = {file.rfilename: file for file in info.siblings or []}
    name = uri.path_in_repo or _only_data_file(list(files), source)
    url = hub.hf_hub_url(uri.id, name, repo_type="dataset", revision=info.sha, endpoint=endpoint)
    token = hub.get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # The hub's client explains a refusal; requests, which receives the file, would know the status only.
    _retry(bind(hub.get_hf_file_metadata, url, token=token, endpoint=endpoint))
    lfs = files[name].lfs if name in files else None
    return _Origin(_file_name(name), bind(_open_http, url, headers), info.sha, lfs.sha256 if lfs else None)


def _only_data_file(names: list[str], source: str) -> str:
    found = [name for name in names if _is_data_file(name)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(
            f"{source} holds no .json, .jsonl, .csv, .txt or .parquet file; append the file's name"
        )
    listed = ", ".join(found[:10]) + (", …" if len(found) > 10 else "")
    raise UserError(f"{source} holds {len(found)} data files ({listed}); append one to the source, for "
                    f"example {source.rstrip('/')}/{found[0]}")  # fmt: skip


def _file_name(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    return name if name not in ("", ".", "..", MANIFEST, STATE) else "data" + Path(name).suffix


def _without_secrets(source: str) -> str:
    """The source without user, password and query: a query may be a signature that grants access."""
    scheme, mark, rest = source.partition("://")
    if scheme not in ("http", "https"):
        return source
    host, slash, path = rest.partition("/")
    return scheme + mark + host.rsplit("@", 1)[-1] + slash + re.sub(r"[?#].*", "", path)


# --- opening it ------------------------------------------------------------------------------------


def _local_origin(path: Path) -> _Origin:
    @contextmanager
    def open_local(offset: int, version: str | None) -> Iterator[_Body]:
        with path.open("rb") as file:
            yield _Body(0, path.stat().st_size, None, iter(lambda: file.read(CHUNK_BYTES), b""))

    return _Origin(_file_name(path.name), open_local)


@contextmanager
def _open_http(url: str, headers: Mapping[str, str], offset: int, version: str | None) -> Iterator[_Body]:
    asked = {**headers, "Accept-Encoding": "identity"}
    if offset and version:
        asked |= {"Range": f"bytes={offset}-", "If-Range": version}
    with requests.get(url, headers=asked, stream=True, timeout=TIMEOUT_SECONDS) as response:
        etag, length = response.headers.get("ETag"), response.headers.get("Content-Length")
        # If-Range compares strongly, so that a weak ETag is of no use to resume.
        found = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
        total = int(length) if length else None
        part = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        continues = response.status_code == 206 and part and int(part[1]) == offset and found == version
        if offset and response.status_code in (206, 416) and not continues:
            # A server that knows Range but not If-Range, and whose file has changed.
            with _open_http(url, headers, 0, None) as body:
                yield body
            return
        _check_answer(response, _without_secrets(url))
        if continues and part:
            total = int(part[2])
        else:
            offset = 0
        # A server that compresses although it was told not to: the length is that of the compressed body.
        encoding = response.headers.get("Content-Encoding", "identity")
        decode = encoding != "identity" and not url.endswith(".gz")
        chunks = response.raw.stream(CHUNK_BYTES // 8, decode_content=decode)
        yield _Body(offset, None, None, chunks) if decode else _Body(offset, total, found, chunks)


def _check_answer(response: requests.Response, shown: str) -> None:
    status = response.status_code
    if status in (408, 429) or status >= 500:
        raise _Interrupted(f"the server answered {status} {response.reason}")
    remedies = {
        401: "it needs a login; use an address with its own permission (a signed link), s3:// or a path",
        403: "access is refused; check that the link has not expired and that you may read it",
        404: "nothing is there; check the address",
        410: "nothing is there any more; check the address",
    }
    if status >= 400:
        remedy = remedies.get(status, "check the address")
        raise UserError(f"{shown} answered {status} {response.reason}: {remedy}")
    if response.headers.get("Content-Type", "").startswith("text/html"):
        raise UserError(f"{shown} is a web page, not a data file; use the link that downloads the file")


@contextmanager
def _open_s3(path: str, arguments: Mapping[str, Any], offset: int, version: str | None) -> Iterator[_Body]:
    import s3fs  # half a second, and only this source needs it

    timeouts = {"connect_timeout": TIMEOUT_SECONDS, "read_timeout": TIMEOUT_SECONDS}
    config = {"retries": {"total_max_attempts": 1}, **timeouts}
    storage = s3fs.S3FileSystem(**arguments, config_kwargs=config, skip_instance_cache=True)
    storage.retries = 1  # attempts are counted and logged here, in one place
    info = _s3_object(storage, path)
    if not version or version != info["ETag"]:
        offset = 0
    # s3fs sends If-Match with every range: an object that is replaced meanwhile is an error, not a mixture.
    with storage.open(path, "rb", cache_type="none") as file:
        file.seek(offset)
        yield _Body(offset, info["size"], info["ETag"] or None, iter(lambda: file.read(CHUNK_BYTES), b""))


def _s3_object(storage: Any, path: str) -> dict[str, Any]:
    bucket = path.partition("/")[0]
    try:
        info: dict[str, Any] = storage.info(path)
    except FileNotFoundError:
        try:
            storage.info(bucket)
        except FileNotFoundError:
            endpoint = storage.endpoint_url or "AWS"
            raise UserError(f"s3://{path}: there is no bucket '{bucket}'; check the name and the endpoint "
                            f"({endpoint}; AWS_ENDPOINT_URL sets it)") from None  # fmt: skip
        except PermissionError:
            pass  # the bucket may be closed to listing; the object is missing either way
        raise UserError(f"s3://{path}: bucket '{bucket}' has no such object; check the key") from None
    if info["type"] == "directory":
        raise UserError(f"s3://{path} is a folder; name one object in it")
    return info


# --- receiving it ----------------------------------------------------------------------------------


def _receive(origin: _Origin, partial: Path, key: Mapping[str, Any], facts: dict[str, Any]) -> None:
    """Bring `partial/NAME.part` to its full length, going on from what is there where that is safe."""
    identity = {"key": key, "revision": origin.revision, "name": origin.name}
    part = partial / f"{origin.name}.part"
    state = _keep_if(partial, identity)
    have, total = _size(part), state.get("bytes")
    if have and have == total:
        facts |= {"bytes": have, "revision": origin.revision or state["etag"]}
        return
    resumable = have and total and have < total and state.get("version")
    with origin.open(have if resumable else 0, state.get("version")) as body:
        facts |= {"bytes": body.total_bytes or 0, "revision": origin.revision or body.etag}
        if body.offset == 0:
            part.unlink(missing_ok=True)
            state = {"version": body.version, "etag": body.etag, "bytes": body.total_bytes}
            write_json(partial / STATE, {"identity": identity, **state})
        else:
            log.info("fetch: %s: going on at byte %s", origin.name, f"{body.offset:,}")
        _check_space(partial, body.total_bytes or 0)
        bar = _Bar(total=body.total_bytes, initial=body.offset, desc=origin.name, unit="B", unit_scale=True)
        with part.open("ab") as file, bar, _logged_growth(partial, body.total_bytes):
            for chunk in body.chunks:
                file.write(chunk)
                bar.update(len(chunk))
    if body.total_bytes is not None and _size(part) != body.total_bytes:
        raise _Interrupted(f"{_size(part):,} of {body.total_bytes:,} bytes arrived")


def _finish(origin: _Origin, partial: Path, sha256: str | None, facts: dict[str, Any], shown: str) -> None:
    """Check the content and give the file its final name."""
    part = partial / f"{origin.name}.part"
    found = sha256_file(part)
    problem = None
    if _size(part) == 0:
        problem = f"{shown} is empty (0 bytes); give a file with data"
    elif sha256 and found != sha256:
        problem = f"{shown} has sha256 {found}, expected {sha256}; correct data.sha256 or restore the file"
    elif origin.sha256 and found != origin.sha256:
        problem = f"{shown} arrived with sha256 {found}, the hub says {origin.sha256}; run the step again"
    if problem:
        _empty(partial)
        raise UserError(problem)
    facts |= {"bytes": _size(part), "sha256": found, "file": origin.name}
    part.rename(partial / origin.name)
    (partial / STATE).unlink()


def _fetched(directory: Path, facts: Mapping[str, Any], *, reused: bool) -> Fetched:
    return Fetched(path=directory / facts["file"], source=facts["source"], revision=facts["revision"],
                   bytes=facts["bytes"], sha256=facts["sha256"], reused=reused)  # fmt: skip


# --- the model's files -----------------------------------------------------------------------------


def _model_files(siblings: list[Any], shown: str) -> list[Any]:
    """What transformers reads, and the licence."""
    files = [file for file in siblings if MODEL_FILE.fullmatch(file.rfilename)]
    names = {file.rfilename for file in files}
    if not any(name.endswith(".safetensors") for name in names):
        raise UserError(f"{shown} has no .safetensors file; take a model or a revision that has safetensors")
    if "config.json" not in names:
        raise UserError(f"{shown} has no config.json; take a model that transformers can load")
    return files


def _snapshot(api: hub.HfApi, name: str, commit: str, partial: Path, files: list[Any]) -> None:
    names = [file.rfilename for file in files]
    try:
        api.snapshot_download(name, revision=commit, local_dir=partial, allow_patterns=names, tqdm_class=_Bar)
    except hub_errors.LocalEntryNotFoundError as error:
        raise error.__cause__ or error from None  # the hub's own answer, hidden behind "not found locally"
    except RuntimeError as error:  # hf_xet has no class of its own for a transfer that failed
        raise _Interrupted(str(error)) from None
    # When the hub cannot be reached, snapshot_download returns an incomplete folder with a warning only.
    for file in files:
        path = partial / file.rfilename
        if not path.is_file() or file.size not in (None, path.stat().st_size):
            raise _Interrupted(f"{file.rfilename} did not arrive in full")


def _check_weights(partial: Path, files: list[Any], shown: str) -> None:
    for file in files:
        if file.lfs and sha256_file(partial / file.rfilename) != file.lfs.sha256:
            _empty(partial)
            raise UserError(f"{shown}: {file.rfilename} has another sha256 than the hub says; run again")


# --- partial directories, disks and retries --------------------------------------------------------


@contextmanager
def _published(directory: Path, key: Mapping[str, Any], facts: dict[str, Any]) -> Iterator[Path]:
    """`publish` that leaves a partial directory only where the next attempt can go on from it."""
    partial = partial_directory(directory)
    try:
        with publish(directory, key, facts, keep_partial=True):
            yield partial
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            shutil.rmtree(partial, ignore_errors=True)
            raise _disk_full(directory, facts.get("bytes", 0)) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"cannot read or write {error.filename or directory} ({error.strerror}); check "
                            "the volume's access mode and the permissions") from None  # fmt: skip
        raise
    finally:
        if not _received(partial):
            shutil.rmtree(partial, ignore_errors=True)


def _keep_if(partial: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what lies in `partial` if it was received for `identity`; otherwise start it anew."""
    try:
        state: dict[str, Any] = json.loads((partial / STATE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        state = {}
    if state.get("identity") != identity:
        _empty(partial)
        state = {"identity": identity}
        write_json(partial / STATE, state)
    return state


def _empty(partial: Path) -> None:
    shutil.rmtree(partial)
    partial.mkdir()


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a directory; 0 when there is none."""
    total = 0
    for file in [path, *path.rglob("*")]:
        with suppress(FileNotFoundError):  # renamed by the transfer meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


def _received(partial: Path) -> int:
    return _size(partial) - _size(partial / STATE)


def _check_space(partial: Path, total_bytes: int) -> None:
    if total_bytes - _received(partial) > shutil.disk_usage(partial).free:
        _empty(partial)
        raise _disk_full(partial, total_bytes)


def _disk_full(directory: Path, needed_bytes: int) -> UserError:
    free = shutil.disk_usage(directory.parent).free
    return UserError(f"no space in {directory.parent}: {needed_bytes:,} bytes are needed, {free:,} bytes "
                     "are free; free some, or take a larger volume")  # fmt: skip


@contextmanager
def _logged_growth(directory: Path, total: int | None) -> Iterator[None]:
    """A plain line every few seconds for logs that are no terminal; a terminal has bars."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(PROGRESS_SECONDS):
            log.info("fetch: %s of %s bytes", f"{_size(directory):,}", f"{total:,}" if total else "unknown")

    thread = threading.Thread(target=watch, daemon=True)
    if not sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.ident:
            thread.join()


_NETWORK_ERRORS = (
    _Interrupted,
    requests.ConnectionError,
    requests.Timeout,
    urllib3.exceptions.HTTPError,
    httpx2.TransportError,
    hub_errors.LocalEntryNotFoundError,  # what hf_hub_download makes of an unreachable hub
    botocore.exceptions.ConnectionError,
    botocore.exceptions.HTTPClientError,
    ConnectionError,
    TimeoutError,
)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, hub_errors.OfflineModeIsEnabled):
        return False
    if isinstance(error, hub_errors.HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    if type(error) is OSError and error.errno is None:
        return True  # huggingface_hub's check of a file's size
    if isinstance(error, OSError) and error.errno in (errno.EREMOTEIO, errno.EBUSY):
        return True  # what s3fs makes of 500, of 503 and of an object that was replaced meanwhile
    return isinstance(error, _NETWORK_ERRORS)


def _retry(call: Callable[[], _T]) -> _T:
    def announce(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        wait = state.next_action.sleep if state.next_action else 0
        number = f"attempt {state.attempt_number} of {ATTEMPTS}"
        log.info("fetch: %s: %s; again in %.1f s", number, _reason(error), wait)

    return tenacity.Retrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS),
        wait=tenacity.wait_exponential_jitter(multiplier=RETRY_WAIT_SECONDS, jitter=RETRY_WAIT_SECONDS),
        retry=tenacity.retry_if_exception(_is_transient),
        before_sleep=announce,
        reraise=True,
    )(call)


@contextmanager
def _one_line(shown: str, endpoint: str) -> Iterator[None]:
    """What the clients raise, as a UserError that says what to do. Errors of the disk pass."""
    try:
        yield
    except (hub_errors.HfHubHTTPError, hub_errors.OfflineModeIsEnabled) as error:
        raise UserError(f"{shown} {_hub_problem(error, endpoint)}") from None
    except hub_errors.HFValidationError:
        raise UserError(f"{shown} is no name on the hub; write OWNER/NAME, or a local path") from None
    except _NETWORK_ERRORS as error:
        at = f" ({endpoint})" if shown.startswith(("hf://", "model ")) else ""
        raise UserError(f"{shown}{at} could not be fetched: {_reason(error)}; check the network, the proxy "
                        "and the address and run the step again, which goes on from what arrived; without a "
                        "network, give base_model or data_source a local path") from None  # fmt: skip
    except requests.RequestException as error:
        raise UserError(f"{shown} cannot be fetched: {_reason(error)}; check the address") from None
    except botocore.exceptions.BotoCoreError as error:
        raise UserError(f"{shown}: {_reason(error)}; {S3_REMEDY}") from None
    except OSError as error:
        # s3fs raises bare PermissionErrors; those of the disk have a number.
        refused = isinstance(error, PermissionError) and error.errno is None
        if refused or isinstance(error.__cause__, botocore.exceptions.ClientError):
            raise UserError(f"{shown}: S3 refused: {error.__cause__ or error}; {S3_REMEDY}") from None
        raise


def _hub_problem(error: Exception, endpoint: str) -> str:
    if not isinstance(error, hub_errors.HfHubHTTPError):
        return "cannot be fetched while HF_HUB_OFFLINE is set; unset it for this step, or give a local path"
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
    return text if isinstance(error, _Interrupted) else f"{type(error).__name__}: {text}"
