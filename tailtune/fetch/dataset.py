"""Fetch the data files once, complete or not at all.

This module defines what a source is and how it is opened; `tailtune.fetch.transfer` receives the bytes,
also those of data files on the hub: `hf_hub_download` deletes unfinished files since version 2.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from glob import has_magic
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import huggingface_hub as hub
import requests
from huggingface_hub import errors as hub_errors

from tailtune.errors import UserError
from tailtune.fetch import transfer
from tailtune.fetch.choice import FORMATS_SHOWN, Wanted, choose_files, local_files
from tailtune.fetch.hub import hub_endpoint, hub_token, query_hub
from tailtune.fetch.transfer import STATE, Body, Origin
from tailtune.files import sha256_json
from tailtune.log import log
from tailtune.manifest import MANIFEST, read_manifest
from tailtune.recipe.addresses import with_secrets, without_secrets
from tailtune.recipe.schema import show_sources, source_list

TIMEOUT_SECONDS = 60.0
CHUNK_BYTES = 8 * 2**20
MAX_NAME_BYTES = 200
"""Of a file; file systems take 255, and numbers and .part are added."""
HUB_FORM = "hf://datasets/OWNER/NAME[@revision][/file]"
SIDES = ("train", "validation")


@dataclass(frozen=True)
class Fetched:
    path: Path
    """The data file under its final name, or the directory of several files."""
    source: str
    revision: str | None
    """The resolved commit for `hf://`, otherwise the server's ETag, if there is one."""
    bytes: int
    sha256: str
    reused: bool
    """Whether an earlier fetch was complete, so that no file was touched."""


def fetch_dataset(
    source: str | list[str],
    directory: Path,
    *,
    validation_source: str | list[str] | None = None,
    sha256: str | None = None,
    keep: bool = False,
) -> Fetched:
    """Fetch the data files into `directory`, unless they are there already.

    A source is a file, a directory, a glob, `https://…`, `s3://BUCKET/KEY`, `s3://BUCKET/FOLDER/`,
    `hf://datasets/OWNER/NAME[@revision][/file][?config=…&split=…]`, or `embedded` (the file in the image). The
    manifest's facts list the files in the order of the sources, those of one source by name. A branch is resolved once;
    the commit is recorded and kept. `sha256` is the expected hash, where `source` is one file. With `keep`, files that
    differ from those in `directory` are refused. Raises UserError.
    """
    sources = [(side, each) for side, given in zip(SIDES, (source, validation_source), strict=True)
               for each in source_list(given)]  # fmt: skip
    shown = ", ".join(without_secrets(each) for _, each in sources)
    earlier = read_manifest(directory) if keep else None
    local = {each: local_files(each) for _, each in sources}
    # The query of an address, often a signature, must not be stored, so its hash tells addresses apart.
    key = {
        "sources": [
            [side, without_secrets(each), sha256_json(each), [_version(path) for path in local[each] or []]]
            for side, each in sources
        ],
        "sha256": sha256,
    }
    if manifest := read_manifest(directory, key):
        log.info("fetch: %s is already here: %s", shown, directory)
        return _fetched(directory, manifest["facts"], reused=True)
    facts: dict[str, Any] = {"source": show_sources(source)}
    if validation_source:
        facts["validation_source"] = show_sources(validation_source)
    with transfer.complete_or_absent(directory, key, facts, shown, hub_endpoint()) as (partial_dir, hashes):
        found = [(side, origin) for side, each in sources for origin in find_origins(each, local[each])]
        origins = _with_unique_names([origin for _, origin in found])
        num_train = sum(side == "train" for side, _ in found)
        if sha256 and num_train > 1:
            problem = f"data.sha256 is the hash of one file, but data.source is {num_train} files"
            raise UserError(problem, "leave data.sha256 out, or name one file")
        transfer.keep_if_same(partial_dir, {"key": key, "files": [[each.name, each.revision] for each in origins]})
        files: list[dict[str, Any]] = []
        for (side, _), origin in zip(found, origins, strict=True):
            files.append({"side": side, "source": origin.shown})
            try:
                transfer.receive(origin, partial_dir, files[-1], sha256 if side == "train" else None)
            finally:  # how much is needed, when the disk is full
                facts["bytes"] = sum(file.get("bytes", 0) for file in files)
            hashes[origin.name] = files[-1]["sha256"]
        facts |= _totals(files)
        if earlier and earlier["facts"]["sha256"] != facts["sha256"]:
            transfer.empty(partial_dir)
            raise UserError(
                f"{shown} differs from the file that this run was trained on",
                f"choose another --run-name, restore it (sha256 {earlier['facts']['sha256']}), or delete the run's "
                "models directory",
            )
    what = f"{len(files)} files, " if len(files) > 1 else ""
    log.info("fetch: %s: %s%s bytes, sha256 %s", shown, what, f"{facts['bytes']:,}", facts["sha256"])
    return _fetched(directory, facts, reused=False)


def _totals(files: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts of all files together: a single file's hash and revision are those of the whole."""
    revisions = {file["revision"] for file in files if file["revision"]}
    hashes = [file["sha256"] for file in files]
    return {
        "files": files,
        "bytes": sum(file["bytes"] for file in files),
        "revision": revisions.pop() if len(revisions) == 1 else None,
        "sha256": hashes[0] if len(hashes) == 1 else sha256_json(hashes),
    }


def _fetched(directory: Path, facts: Mapping[str, Any], *, reused: bool) -> Fetched:
    known = {name: facts[name] for name in ("source", "revision", "bytes", "sha256")}
    files = facts["files"]
    return Fetched(directory / files[0]["file"] if len(files) == 1 else directory, **known, reused=reused)


def _with_unique_names(origins: list[Origin]) -> list[Origin]:
    """Return several origins with a number before each name, so that none has the name of another or of its parts."""
    if len(origins) == 1:
        return origins
    return [replace(origin, name=f"{index:04}-{origin.name}") for index, origin in enumerate(origins)]


def _version(path: Path) -> list[Any]:
    """Return what tells a local file from another version of it: a program can set the time of the last change,
    but not that of the last change of the file's status."""
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def find_origins(source: str, local: list[Path] | None) -> list[Origin]:
    """Return how the files of a source are opened. Raises UserError when it is not supported."""
    if local is not None:
        shown = [source] if len(local) == 1 else map(str, local)
        return [Origin(_file_name(path.name), name, partial(_open_local, path))
                for path, name in zip(local, shown, strict=True)]  # fmt: skip
    scheme, shown_source = source.partition("://")[0], without_secrets(source)
    if scheme in ("http", "https"):
        try:
            path = unquote(urlsplit(source).path)
        except ValueError as error:
            raise UserError(f"{shown_source} is no valid address: {error}", "check it") from None
        return [Origin(_file_name(path), shown_source, partial(_open_http, source, {}))]
    if scheme == "s3":
        return _s3_origins(source)
    if scheme == "hf":
        return _hub_origins(source, hub_endpoint())
    raise UserError(
        f"data source {shown_source}: '{scheme}://' is not supported",
        "use hf://datasets/…, https://, s3://, a path or 'embedded'",
    )


def _hub_origins(source: str, endpoint: str) -> list[Origin]:
    address, _, query = source.partition("?")
    pairs = parse_qsl(query, keep_blank_values=True)
    options = dict(pairs)
    if len(options) < len(pairs):
        raise UserError(f"{source} names a configuration or a split twice", "give each of them as a source of its own")
    if unknown := options.keys() - {"config", "split"}:
        raise UserError(f"{source}: '{min(unknown)}' is not known after '?'", "write ?config=NAME&split=NAME")
    try:
        uri = hub.parse_hf_uri(address)
    except hub_errors.HfUriError as error:
        raise UserError(f"{error.args[0].strip()} Write {HUB_FORM}") from None
    if uri.type != "dataset":
        raise UserError(f"{source} is not a dataset", f"write {HUB_FORM}")
    api = hub.HfApi(endpoint=endpoint)
    info = query_hub(api.dataset_info, uri.id, revision=uri.revision, files_metadata=True)
    log.info("fetch: %s: %s is commit %s", source, uri.revision or "main", info.sha)
    files = {file.rfilename: file for file in info.siblings or []}
    wanted = Wanted(address, uri.path_in_repo, options.get("config"), options.get("split"))
    try:
        card = info.card_data.to_dict() if info.card_data else {}
        names = choose_files(files, wanted, card) or [uri.path_in_repo]
    except (TypeError, AttributeError):
        problem = f"{source}: the data set's card has configurations that cannot be read"
        raise UserError(problem, "append a file's name or a pattern") from None
    urls = [hub.hf_hub_url(uri.id, name, repo_type="dataset", revision=info.sha, endpoint=endpoint) for name in names]
    token = hub_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # The hub's client explains a refusal; requests, which receives the file, knows only the status.
    query_hub(hub.get_hf_file_metadata, urls[0], token=token, endpoint=endpoint)
    base = f"hf://datasets/{uri.id}@{info.sha}"
    lfs = [files[name].lfs if name in files else None for name in names]
    return [
        Origin(_file_name(name), source if len(names) == 1 else f"{base}/{name}", partial(_open_http, url, headers),
               info.sha, pointer.sha256 if pointer else None)
        for name, url, pointer in zip(names, urls, lfs, strict=True)
    ]  # fmt: skip


def _file_name(path: str) -> str:
    """Return the name that a file is stored with, whose end says its format: no special, strange or long one."""
    plain = re.sub(r"[\x00-\x1f\x7f\\]", "_", path.rsplit("/", 1)[-1])
    name = plain.encode(errors="replace")[-MAX_NAME_BYTES:].decode(errors="ignore")
    return name if name not in ("", ".", "..", MANIFEST, STATE) else "data" + Path(name).suffix


@contextmanager
def _open_local(path: Path, offset: int, version: str | None) -> Iterator[Body]:
    before, size = _version(path), path.stat().st_size
    with path.open("rb") as file:  # it is not read further than its size was, or one that grows might never end
        yield Body(0, size, str(before), iter(lambda: file.read(min(CHUNK_BYTES, size - file.tell())), b""))
    if _version(path) != before:
        raise UserError(f"{path} was changed while it was read", "wait until it is complete, and run again")


@contextmanager
def _open_http(url: str, headers: Mapping[str, str], offset: int, version: str | None) -> Iterator[Body]:
    request_headers = {**headers, "Accept-Encoding": "identity"}
    if offset and version:
        request_headers |= {"Range": f"bytes={offset}-", "If-Range": version}
    address = with_secrets(url)  # from here on, only messages name the url
    try:
        response = requests.get(address, headers=request_headers, stream=True, timeout=TIMEOUT_SECONDS)
    except ValueError as error:  # also of a redirection; its text may contain the address
        if isinstance(error, requests.RequestException) and not isinstance(error, requests.exceptions.InvalidURL):
            raise
        raise UserError(
            f"{without_secrets(url)} cannot be fetched: it is, or leads to, an invalid address",
            "check the address and its variables",
        ) from None
    with response:
        etag, length = response.headers.get("ETag"), response.headers.get("Content-Length")
        # If-Range compares strongly, so a weak ETag cannot be used to resume.
        answered_version = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
        total = int(length) if length and re.fullmatch(r"[0-9]{1,18}", length) else None
        part = re.fullmatch(r"bytes ([0-9]{1,18})-[0-9]+/([0-9]{1,18})", response.headers.get("Content-Range", ""))
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
        401: "it needs a login; use a signed link (docs/data.md), s3:// or a path",
        403: "access is refused; check that the link has not expired and that you may read it",
        404: "nothing is there; check the address",
        410: "nothing is there any more; check the address",
    }
    if status >= 400:
        remedy = remedies.get(status, "check the address")
        raise UserError(f"{shown} answered {status} {response.reason}: {remedy}")
    if response.headers.get("Content-Type", "").lower().startswith(("text/html", "application/xhtml")):
        raise transfer.web_page(shown)


def _s3_origins(source: str) -> list[Origin]:
    """Return the objects of `s3://BUCKET/KEY`, `s3://BUCKET/FOLDER/` or a pattern such as `s3://BUCKET/F/*.jsonl`."""
    bucket, slash, key = source.removeprefix("s3://").partition("/")
    if not bucket or not slash:
        raise UserError(f"{source} names no object", "write s3://BUCKET/KEY")
    arguments = _s3_arguments()
    if key and not has_magic(key) and not key.endswith("/"):
        return [Origin(_file_name(key), source, partial(_open_s3, f"{bucket}/{key}", arguments))]
    # the folder ends before the first part of a pattern
    folder = re.sub(r"[^/]*[*?[].*", "", key)
    found = transfer.call_with_retries(partial(_list_s3, bucket, folder, arguments))
    wanted = Wanted(source, key.removeprefix(folder) if has_magic(key) else "")
    names = choose_files([name.removeprefix(f"{bucket}/{folder}") for name in found], wanted)
    if not names:
        raise UserError(f"{source} matches no {FORMATS_SHOWN} object", "check the pattern")
    paths = [f"{bucket}/{folder}{name}" for name in names]
    return [
        Origin(_file_name(path), f"s3://{path}", partial(_open_s3, path, arguments), found[path]["ETag"].strip('"'))
        for path in paths
    ]


def _list_s3(bucket: str, folder: str, arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return all objects below a folder by path, with the bucket."""
    storage = _s3_storage(arguments)
    _check_s3_bucket(storage, bucket, f"{bucket}/{folder}")
    found: dict[str, dict[str, Any]] = storage.find(f"{bucket}/{folder}", detail=True)
    return {name: info for name, info in found.items() if info["type"] == "file"}


def _s3_storage(arguments: Mapping[str, Any]) -> Any:
    import s3fs  # takes half a second, and only this source needs it

    timeouts = {"connect_timeout": TIMEOUT_SECONDS, "read_timeout": TIMEOUT_SECONDS}
    once = {"retries": {"total_max_attempts": 1}}  # transfer.call_with_retries counts and logs all attempts
    storage = s3fs.S3FileSystem(**arguments, config_kwargs={**timeouts, **once}, skip_instance_cache=True)
    storage.retries = 1
    return storage


@contextmanager
def _open_s3(path: str, arguments: Mapping[str, Any], offset: int, version: str | None) -> Iterator[Body]:
    storage = _s3_storage(arguments)
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
        _check_s3_bucket(storage, bucket, path)
        raise UserError(f"s3://{path}: bucket '{bucket}' has no such object", "check the key") from None
    if info["type"] == "directory":
        remedy = f"name one object in it, or write s3://{path}/ for all of its data files"
        raise UserError(f"s3://{path} is a folder", remedy)
    return info


def _check_s3_bucket(storage: Any, bucket: str, path: str) -> None:
    """Raise UserError when there is no such bucket."""
    try:
        storage.info(bucket)
    except FileNotFoundError:
        endpoint = storage.endpoint_url or "AWS"
        remedy = f"check the name and the endpoint ({endpoint}; AWS_ENDPOINT_URL sets it)"
        raise UserError(f"s3://{path}: there is no bucket '{bucket}'", remedy) from None
    except PermissionError:
        pass  # the bucket may not be described; what it contains is another question


def _s3_arguments() -> dict[str, Any]:
    """Return the arguments of S3FileSystem; botocore finds missing ones by its own rules (variables, roles)."""
    secret = os.environ.get("TAILTUNE_S3_SECRET_DIR")
    if secret and not Path(secret).is_dir():
        raise UserError(f"TAILTUNE_S3_SECRET_DIR is {secret}, which is not a directory", "mount the secret there")

    def mounted(name: str) -> str | None:
        file = Path(secret or "", name)
        text = file.read_text(errors="replace").strip() if secret and file.is_file() else ""
        if not re.fullmatch(r"[!-~]*", text):
            raise UserError(f"{file} contains a space or another character that it cannot have", "correct it")
        return text or None

    # The names are the keys of an OpenShift AI data connection, as variables or as a mounted secret.
    endpoint = mounted("AWS_S3_ENDPOINT") or os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_S3_ENDPOINT")
    if endpoint and "://" not in endpoint:
        endpoint = f"https://{endpoint}"
    if endpoint:
        transfer.check_endpoint("AWS_ENDPOINT_URL or AWS_S3_ENDPOINT", endpoint)
    return {"key": mounted("AWS_ACCESS_KEY_ID"), "secret": mounted("AWS_SECRET_ACCESS_KEY"),
            "endpoint_url": endpoint, "client_kwargs": {"region_name": mounted("AWS_DEFAULT_REGION")}}  # fmt: skip
