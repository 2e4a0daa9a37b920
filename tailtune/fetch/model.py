"""Provide the base model of a run: fetched from the hub, used in place, or built small."""

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub as hub
from huggingface_hub import errors as hub_errors

from tailtune.errors import UserError, one_line
from tailtune.fetch import transfer
from tailtune.fetch.hub import COMMIT, hub_endpoint, query_hub
from tailtune.fetch.lease import one_writer
from tailtune.files import GARBAGE, discard, read_json, sha256_file, sha256_json, write_json
from tailtune.kinds import kind_module
from tailtune.log import log
from tailtune.manifest import RESULTS_VERSION, content_sha256, publish, read_manifest
from tailtune.parquet.split import read_split
from tailtune.recipe.schema import Recipe
from tailtune.run import DATA_FILE
from tailtune.shared_cache import use_entry

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
COMMIT_RECORD = "base_model.json"
"""File of a run next to its `base_model`: which commit a revision was when the run first asked."""


def provide_base_model(
    recipe: Recipe, data_dir: Path, directory: Path, cache_dir: Path | None = None, store: Path | None = None
) -> Path:
    """Return the base model's directory: `directory` when it is fetched or built, else the one that the recipe names.

    A small model learns its tokenizer and first words from the training rows of `data_dir`'s Parquet file. Runs with
    the same `cache_dir` build it only once, and runs with the same `store` fetch a hub model only once. Raises
    UserError.
    """
    name = recipe.model.base_model
    if name == "small":
        return _provide_small_model(recipe, data_dir, directory, cache_dir)
    if path := recipe.model.directory:
        if not (path / "config.json").is_file():
            raise UserError(f"base_model {path} contains no config.json", "give the directory of a Transformers model")
        log.info("model: %s is used in place", path)
        return path.resolve()
    if not HUB_NAME.fullmatch(name):
        problem = f"base_model '{name}' is neither a directory nor a hub name"
        raise UserError(problem, "give OWNER/NAME, a path, or small")
    if store is None:
        return fetch_model(name, directory, revision=recipe.model.revision)
    return provide_shared_model(name, directory, store, revision=recipe.model.revision)


def check_base_model(recipe: Recipe, directory: Path) -> None:
    """Load the base model without its weights, as training will load it with them. Raises UserError."""
    kind_module(recipe.stages[0].kind, "inference").check_model(directory, recipe.prompt)


def _provide_small_model(recipe: Recipe, data_dir: Path, directory: Path, cache_dir: Path | None) -> Path:
    """Return `directory` with the recipe's small model: left as it is, copied from the cache, or built.

    The run owns its copy (a few megabytes): trained checkpoints stay usable when the cache is deleted.
    """
    small = recipe.model.small
    if small is None:
        raise UserError("model.base_model is 'small' but the recipe has no model.small", "describe it there")
    if directory.is_symlink():
        directory.unlink()  # the recipe named a hub model before
    key = {
        "version": RESULTS_VERSION,
        "small": small.model_dump(),
        "prompt": recipe.prompt.model_dump(),
        "data": content_sha256(data_dir, DATA_FILE),
        "split": [recipe.data.split_by, recipe.data.validation_share],
        "seed": recipe.seed,
    }
    if read_manifest(directory, key):
        log.info("model: small %s is already built", small.model_type)
        return directory
    if cache_dir and _copy_from_cache(cache_dir, key, directory):
        log.info("model: small %s was built by an earlier run: copied", small.model_type)
        return directory
    from tailtune.fetch.small_model import build_small_model  # torch: seconds that the other ways do not need

    train, _ = read_split(recipe, data_dir / DATA_FILE)
    build_small_model(recipe, small, train, key, directory)
    if cache_dir:
        with _cache_errors_logged():
            # Every build has a name of its own, so two runs that build the same model at once do not collide.
            _copy_published(directory, use_entry(cache_dir, key) / uuid.uuid4().hex)
    return directory


def _copy_from_cache(cache_dir: Path, key: Mapping[str, Any], directory: Path) -> bool:
    """Copy a complete model of this key to `directory`; return whether there was one."""
    with _cache_errors_logged():
        builds = sorted(path for path in use_entry(cache_dir, key).glob("*/") if path.suffix != ".partial")
        for build in builds:
            if read_manifest(build, key):
                _copy_published(build, directory)
                return True
    return False


@contextmanager
def _cache_errors_logged() -> Iterator[None]:
    """Log an OSError of the shared cache, and continue without it: a run needs no cache."""
    try:
        yield
    except OSError as error:
        log.warning("model: the cache of small models is not used: %s", one_line(error))


def _copy_published(source: Path, target: Path) -> None:
    """Publish a copy of a complete directory, its manifest included."""
    manifest = read_manifest(source)
    if manifest is None:  # another run has just deleted it, because it was not used for long
        raise FileNotFoundError(source)
    with publish(target, manifest["key"], manifest["facts"]) as partial_dir:
        shutil.copytree(source, partial_dir, dirs_exist_ok=True)


def describe_base_model(recipe: Recipe, directory: Path) -> dict[str, str]:
    """Return name, kind (`hub`, `directory`, `small`), note and, if known, revision, for the report."""
    manifest = read_manifest(directory)
    facts = manifest["facts"] if manifest else {}
    small = recipe.model.base_model == "small"
    kind = "small" if small else "directory" if recipe.model.directory else "hub"
    description = {"name": recipe.model.base_model, "kind": kind, "note": str(facts.get("note", ""))}
    if small and recipe.model.small:
        description["name"] = f"small {recipe.model.small.model_type}"
    if facts.get("revision"):
        description["revision"] = str(facts["revision"])
    return description


MODEL_FILE = re.compile(
    r"(?!consolidated)[\w .+@-]{1,180}\.(json|safetensors|txt|model|tiktoken|jinja)"  # not Mistral's second copy
    r"|additional_chat_templates/[\w .+@-]{1,180}\.jinja"
    r"|(LICENSE|NOTICE|USE_POLICY)[\w .+@-]{0,180}"
)


def provide_shared_model(name: str, directory: Path, store: Path, *, revision: str) -> Path:
    """Return `directory`, a run's `base_model`, as a link to the hub model's directory OWNER--NAME@COMMIT in `store`.

    It is a link, so that whatever reads `base_model` need not know of the store, and a relative one, so that it holds
    wherever the volume is mounted. Of several runs that need the same model at once, one fetches it and the others
    wait. The commit of the first attempt is kept. A complete copy in `directory` is left as it is, and where links
    cannot be made, the run gets a copy of its own. Raises UserError.
    """
    key = {"model": name, "revision": revision}
    if not directory.is_symlink() and read_manifest(directory, key):
        return fetch_model(name, directory, revision=revision)  # which says that it is here
    record = read_json(directory.with_name(COMMIT_RECORD)) or {}
    if record.get("key") != key:
        record = {"key": key, "commit": find_commit(name, revision)}
    commit = str(record["commit"])
    entry = store / f"{name.replace('/', '--')}@{commit}"
    try:  # first, because what a run links to is not removed
        write_json(directory.with_name(COMMIT_RECORD), record)
        _link(directory, entry)
    except OSError as error:
        log.warning("fetch: no link can be made at %s (%s), so the run gets a copy of its own", directory, error)
        return fetch_model(name, directory, revision=revision)
    content = {"model": name, "revision": commit}
    with one_writer(entry.with_name(f"{entry.name}.lease"), lambda: bool(read_manifest(entry, content)), name):
        try:
            fetch_model(name, entry, revision=commit)
        except Exception:
            if not read_manifest(entry, content):  # else another run took the lease over meanwhile, and was faster
                raise
    return directory


def _link(link: Path, target: Path) -> None:
    """Make `link` a relative link to `target`, in place of whatever is there. Raises OSError."""
    wanted = os.path.relpath(target.resolve(), link.parent.resolve())
    if link.is_symlink() and os.readlink(link) == wanted:
        return
    if link.is_dir() and not link.is_symlink():
        discard(link)  # another model: the run has not trained yet
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.{uuid.uuid4().hex[:8]}{GARBAGE}")
    temporary.symlink_to(wanted)
    temporary.replace(link)


def find_commit(name: str, revision: str) -> str:
    """Return the commit that a revision of a hub model is now. Raises UserError."""
    if COMMIT.fullmatch(revision):
        return revision
    with transfer.errors_named(f"model {name}", endpoint := hub_endpoint()):
        commit = str(query_hub(hub.HfApi(endpoint=endpoint).model_info, name, revision=revision).sha)
    log.info("fetch: model %s: %s is commit %s", name, revision, commit)
    return commit


def fetch_model(name: str, directory: Path, *, revision: str = "main") -> Path:
    """Fetch a hub model (configuration, tokenizer, chat template, safetensors) into `directory`.

    The revision is resolved to a commit once; the commit is recorded and kept. Files that an interrupted
    attempt received in full are not received again. Returns `directory`. Raises UserError.
    """
    key = {"model": name, "revision": revision}
    shown = f"model {name}"
    if read_manifest(directory, key):
        log.info("fetch: %s is already here: %s", shown, directory)
        return directory
    facts: dict[str, Any] = {"source": f"hf://{name}"}
    endpoint = hub_endpoint()
    with transfer.complete_or_absent(directory, key, facts, shown, endpoint) as (partial_dir, hashes):
        api = hub.HfApi(endpoint=endpoint)
        info = query_hub(api.model_info, name, revision=revision, files_metadata=True)
        files = _model_files(info.siblings or [], shown)
        facts |= {"revision": info.sha, "bytes": sum(file.size or 0 for file in files)}
        log.info("fetch: %s: %s is commit %s, %s bytes", shown, revision, info.sha, f"{facts['bytes']:,}")
        transfer.keep_if_same(partial_dir, {"key": key, "revision": info.sha})
        transfer.check_space(partial_dir, facts["bytes"])
        with transfer.growth(partial_dir, facts["bytes"], shown), hub.utils.disable_progress_bars():
            transfer.call_with_retries(partial(_download_snapshot, api, name, str(info.sha), partial_dir, files))
        shutil.rmtree(partial_dir / ".cache", ignore_errors=True)
        hashes |= _check_hashes(partial_dir, files, shown)
        facts["sha256"] = sha256_json(hashes)
    return directory


def _model_files(siblings: list[Any], shown: str) -> list[Any]:
    """Return the files that Transformers reads, and the licence. Raises UserError when essential ones are missing."""
    files = [file for file in siblings if MODEL_FILE.fullmatch(file.rfilename)]
    names = {file.rfilename for file in files}
    if not any(name.endswith(".safetensors") for name in names):
        raise UserError(f"{shown} has no .safetensors file", "take a model or a revision that has safetensors")
    if "config.json" not in names:
        raise UserError(f"{shown} has no config.json", "take a model that transformers can load")
    return files


def _download_snapshot(api: hub.HfApi, name: str, commit: str, partial_dir: Path, files: list[Any]) -> None:
    """Make one attempt at all files. Raises what the hub answered, and GaveUp when files are missing."""
    names = [file.rfilename for file in files]
    try:
        api.snapshot_download(name, revision=commit, local_dir=partial_dir, allow_patterns=names)
    except hub_errors.LocalEntryNotFoundError as error:
        raise error.__cause__ or error from None  # what the hub answered, hidden behind "not found locally"
    except RuntimeError as error:  # hf_xet has no exception of its own for a failed transfer
        raise transfer.Interrupted(str(error)) from None
    # When the hub's list of files cannot be read in six attempts of the client (23 s in all), snapshot_download
    # returns an incomplete directory with only a warning.
    for file in files:
        path = partial_dir / file.rfilename
        if not path.is_file() or file.size not in (None, path.stat().st_size):
            raise transfer.GaveUp(f"{file.rfilename} did not arrive in full")


def _check_hashes(partial_dir: Path, files: list[Any], shown: str) -> dict[str, str]:
    """Return the SHA-256 of every file by name; compare those of large files with the hub's. Raises UserError."""
    hashes = {file.rfilename: sha256_file(partial_dir / file.rfilename) for file in files}
    for file in files:
        if file.lfs and hashes[file.rfilename] != file.lfs.sha256:
            transfer.empty(partial_dir)
            problem = f"{shown}: {file.rfilename} has a different sha256 from the one that the hub lists"
            raise UserError(problem, "run again")
    return hashes
