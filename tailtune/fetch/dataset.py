"""Fetch the data file once, complete or not at all.

This module defines what a source is and how it is opened; `tailtune.fetch.transfer` receives the bytes,
also those of data files on the hub: `hf_hub_download` deletes unfinished files since version 2.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub as hub
import requests
from huggingface_hub import errors as hub_errors

from tailtune.errors import UserError
from tailtune.fetch import transfer
from tailtune.fetch.hub import hub_endpoint, query_hub
from tailtune.fetch.transfer import STATE, Body, Origin
from tailtune.files import sha256_json
from tailtune.log import log
from tailtune.manifest import MANIFEST, read_manifest
from tailtune.recipe.schema import without_secrets

TIMEOUT_SECONDS = 60.0
CHUNK_BYTES = 8 * 2**20
DATA_FILE_NAME = re.compile(
    r"(^|/)(?!(dataset_infos\.json|license\.txt|requirements\.txt)$)[^/]*\.(json|jsonl|csv|txt|parquet)(\.gz|\.zst)?$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Fetched:
    path: Path
    """The data file under its final name."""
    source: str
    revision: str | None
    """The resolved commit for `hf://`, otherwise the server's ETag, if there is one."""
    bytes: int
    sha256: str
    reused: bool
    """Whether an earlier fetch was complete, so that no file was touched."""


def fetch_dataset(source: str, directory: Path, *, sha256: str | None = None, keep: bool = False) -> Fetched:
    """Fetch one data file into `directory`, unless it is there already.

    `source` is `hf://datasets/OWNER/NAME[@revision][/file]`, `https://…`, `s3://BUCKET/KEY`, a path,
    or `embedded` (the file in the image). A branch is resolved once; the commit is recorded and kept.
    `sha256` is the expected hash. With `keep`, a file that differs from the one in `directory` is refused.
    Raises UserError.
    """
    shown = without_secrets(source)
    earlier = read_manifest(directory) if keep else None
    local = _local_file(source)
    # The query of an address, often a signature, must not be stored, so its hash tells addresses apart.
    key: dict[str, Any] = {"source": shown, "source_sha256": sha256_json(source), "sha256": sha256}
    if local:
        key |= {"bytes": local.stat().st_size, "mtime_ns": local.stat().st_mtime_ns}
    if manifest := read_manifest(directory, key):
        log.info("fetch: %s is already here: %s", shown, directory)
        return _fetched(directory, manifest["facts"], reused=True)
    facts: dict[str, Any] = {"source": shown}
    with transfer.complete_or_absent(directory, key, facts, shown, hub_endpoint()) as (partial_dir, hashes):
        origin = _origin(local or source)
        transfer.receive(origin, partial_dir, key, facts, sha256, shown)
        if earlier and earlier["facts"]["sha256"] != facts["sha256"]:
            transfer.empty(partial_dir)
            raise UserError(
                f"{shown} differs from the file that this run was trained on",
                f"choose another --run-name, restore it (sha256 {earlier['facts']['sha256']}), or delete the run's "
                "models directory",
            )
        hashes[origin.name] = facts["sha256"]
    log.info("fetch: %s: %s bytes, sha256 %s", shown, f"{facts['bytes']:,}", facts["sha256"])
    return _fetched(directory, facts, reused=False)


def _fetched(directory: Path, facts: Mapping[str, Any], *, reused: bool) -> Fetched:
    known = {name: facts[name] for name in ("source", "revision", "bytes", "sha256")}
    return Fetched(directory / facts["file"], **known, reused=reused)


def _local_file(source: str) -> Path | None:
    """Return the file that `embedded` or a path refers to; None for an address. Raises UserError."""
    if source == "embedded":
        return _embedded_file()
    if "://" in source:
        return None
    path = Path(source).expanduser()
    if path.is_dir():
        raise UserError(f"data source {path} is a directory", "name one file in it")
    if not path.is_file():
        raise UserError(
            f"data source {path} does not exist",
            "give the path of a file as this step sees it, hf://datasets/OWNER/NAME, https://…, s3://BUCKET/KEY or "
            "'embedded'",
        )
    return path


def _origin(source: str | Path) -> Origin:
    """Return how a source is opened. Raises UserError when it is not supported."""
    if isinstance(source, Path):
        return Origin(_file_name(source.name), partial(_open_local, source))
    scheme = source.partition("://")[0]
    if scheme in ("http", "https"):
        return Origin(_file_name(unquote(urlsplit(source).path)), partial(_open_http, source, {}))
    if scheme == "s3":
        path = source.removeprefix("s3://").strip("/")
        if "/" not in path:
            raise UserError(f"{source} names no object", "write s3://BUCKET/KEY")
        return Origin(_file_name(path), partial(_open_s3, path, _s3_arguments()))
    if scheme == "hf":
        return _hub_origin(source, hub_endpoint())
    raise UserError(
        f"data source {without_secrets(source)}: '{scheme}://' is not supported",
        "use hf://datasets/…, https://, s3://, a path or 'embedded'",
    )


def _hub_origin(source: str, endpoint: str) -> Origin:
    try:
        uri = hub.parse_hf_uri(source)
    except hub_errors.HfUriError as error:
        raise UserError(f"{error.args[0].strip()} Write hf://datasets/OWNER/NAME[@revision][/file]") from None
    if uri.type != "dataset":
        raise UserError(f"{source} is not a dataset", "write hf://datasets/OWNER/NAME[@revision][/file]")
    api = hub.HfApi(endpoint=endpoint)
    info = query_hub(api.dataset_info, uri.id, revision=uri.revision, files_metadata=True)
    log.info("fetch: %s: %s is commit %s", source, uri.revision or "main", info.sha)
    files = {file.rfilename: file for file in info.siblings or []}
    name = uri.path_in_repo or _only_data_file(list(files), source)
    url = hub.hf_hub_url(uri.id, name, repo_type="dataset", revision=info.sha, endpoint=endpoint)
    token = hub.get_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # The hub's client explains a refusal; requests, which receives the file, knows only the status.
    query_hub(hub.get_hf_file_metadata, url, token=token, endpoint=endpoint)
    lfs = files[name].lfs if name in files else None
    return Origin(_file_name(name), partial(_open_http, url, headers), info.sha, lfs.sha256 if lfs else None)


def _only_data_file(names: list[str], source: str) -> str:
    data_files = [name for name in names if DATA_FILE_NAME.search(name)]
    if len(data_files) == 1:
        return data_files[0]
    if not data_files:
        raise UserError(f"{source} contains no .json, .jsonl, .csv, .txt or .parquet file", "append the file's name")
    listed = ", ".join(data_files[:10]) + (", …" if len(data_files) > 10 else "")
    raise UserError(
        f"{source} contains {len(data_files)} data files ({listed})",
        f"append one to the source, for example {source.rstrip('/')}/{data_files[0]}",
    )


def _file_name(path: str) -> str:
    name = path.rsplit("/", 1)[-1]
    return name if name not in ("", ".", "..", MANIFEST, STATE) else "data" + Path(name).suffix


@contextmanager
def _open_local(path: Path, offset: int, version: str | None) -> Iterator[Body]:
    with path.open("rb") as file:
        yield Body(0, path.stat().st_size, None, iter(lambda: file.read(CHUNK_BYTES), b""))


@contextmanager
def _open_http(url: str, headers: Mapping[str, str], offset: int, version: str | None) -> Iterator[Body]:
    request_headers = {**headers, "Accept-Encoding": "identity"}
    if offset and version:
        request_headers |= {"Range": f"bytes={offset}-", "If-Range": version}
    with requests.get(url, headers=request_headers, stream=True, timeout=TIMEOUT_SECONDS) as response:
        etag, length = response.headers.get("ETag"), response.headers.get("Content-Length")
        # If-Range compares strongly, so a weak ETag cannot be used to resume.
        answered_version = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
        total = int(length) if length else None
        part = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        same_version = answered_version == version
        resumes = response.status_code == 206 and part and int(part[1]) == offset and same_version
        if offset and response.status_code in (206, 416) and not resumes:
            # The server supports Range but not If-Range, and its file has changed.
            with _open_http(url, headers, 0, None) as body:
                yield body
            return
        _check_response(response, without_secrets(url))
        offset, total = (offset, int(part[2])) if resumes and part else (0, total)
        # Some servers compress although they are told not to; the length is then that of the compressed body.
        encoding = response.headers.get("Content-Encoding", "identity")
        decode = encoding != "identity" and not url.endswith(".gz")
        chunks = response.raw.stream(CHUNK_BYTES // 8, decode_content=decode)
        yield Body(offset, None, None, chunks) if decode else Body(offset, total, answered_version, chunks)


def _check_response(response: requests.Response, shown: str) -> None:
    """Raise Interrupted for a status that may be temporary, UserError for others and for web pages."""
    status = response.status_code
    if transfer.is_temporary_status(status):
        raise transfer.Interrupted(f"the server answered {status} {response.reason}")
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
        raise UserError(f"{shown} is a web page, not a data file", "use the link that downloads the file")


@contextmanager
def _open_s3(path: str, arguments: Mapping[str, Any], offset: int, version: str | None) -> Iterator[Body]:
    import s3fs  # takes half a second, and only this source needs it

    timeouts = {"connect_timeout": TIMEOUT_SECONDS, "read_timeout": TIMEOUT_SECONDS}
    once = {"retries": {"total_max_attempts": 1}}  # transfer.call_with_retries counts and logs all attempts
    storage = s3fs.S3FileSystem(**arguments, config_kwargs={**timeouts, **once}, skip_instance_cache=True)
    storage.retries = 1
    info = _s3_object(storage, path)
    if not version or version != info["ETag"]:
        offset = 0
    # s3fs sends If-Match with every range, so an object that is replaced meanwhile is an error, not a mixture.
    with storage.open(path, "rb", cache_type="none") as file:
        file.seek(offset)
        yield Body(offset, info["size"], info["ETag"] or None, iter(lambda: file.read(CHUNK_BYTES), b""))


def _s3_object(storage: Any, path: str) -> dict[str, Any]:
    bucket = path.partition("/")[0]
    try:
        info: dict[str, Any] = storage.info(path)
    except FileNotFoundError:
        try:
            storage.info(bucket)
        except FileNotFoundError:
            endpoint = storage.endpoint_url or "AWS"
            remedy = f"check the name and the endpoint ({endpoint}; AWS_ENDPOINT_URL sets it)"
            raise UserError(f"s3://{path}: there is no bucket '{bucket}'", remedy) from None
        except PermissionError:
            pass  # the bucket may not be listed; the object is missing either way
        raise UserError(f"s3://{path}: bucket '{bucket}' has no such object", "check the key") from None
    if info["type"] == "directory":
        raise UserError(f"s3://{path} is a folder", "name one object in it")
    return info


def _embedded_file() -> Path:
    directory = Path(os.environ.get("TAILTUNE_EMBEDDED_DIR", "/opt/tailtune/data"))
    files = [path for path in sorted(directory.glob("*")) if path.is_file() and DATA_FILE_NAME.search(path.name)]
    if len(files) != 1:
        names = ", ".join(path.name for path in files[:10]) or "none"
        raise UserError(
            f"source 'embedded' needs exactly one data file in {directory}, found {len(files)} ({names})",
            "build the image with one, or set TAILTUNE_EMBEDDED_DIR",
        )
    return files[0]


def _s3_arguments() -> dict[str, Any]:
    """Return the arguments of S3FileSystem; botocore finds missing ones by its own rules (variables, roles)."""
    secret = os.environ.get("TAILTUNE_S3_SECRET_DIR")
    if secret and not Path(secret).is_dir():
        raise UserError(f"TAILTUNE_S3_SECRET_DIR is {secret}, which is not a directory", "mount the secret there")

    def mounted(name: str) -> str | None:
        file = Path(secret or "", name)
        return file.read_text().strip() or None if secret and file.is_file() else None

    # The names are the keys of an OpenShift AI data connection, as variables or as a mounted secret.
    endpoint = mounted("AWS_S3_ENDPOINT") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_S3_ENDPOINT")
    if endpoint and "://" not in endpoint:
        endpoint = f"https://{endpoint}"
    return {"key": mounted("AWS_ACCESS_KEY_ID"), "secret": mounted("AWS_SECRET_ACCESS_KEY"),
            "endpoint_url": endpoint, "client_kwargs": {"region_name": mounted("AWS_DEFAULT_REGION")}}  # fmt: skip
