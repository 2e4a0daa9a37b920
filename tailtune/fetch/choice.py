"""Choose among the files of a data set: its configurations and splits, as its card or the files' names declare them.

Imports no client: `--inspect` uses it where only the default installation is.

The rules are those of the `datasets` library (`data_files.py`, `utils/metadata.py`), for the formats that tailtune
reads. Unlike there, a choice that is needed and missing is an error that lists what there is, a file that belongs to no
split needs one too, and the words for splits are known in any case and as `trainset` or `tests`.
"""

import os
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import Any

from tailtune.errors import UserError, did_you_mean, one_line
from tailtune.files import matching_paths
from tailtune.log import log
from tailtune.parquet.readers import COMPRESSIONS, FORMATS, SUFFIXES

NO_DATA = re.compile(
    r"(.*/)?(\..*|_[^/]*/.*|_[^/.]*|(dataset_infos?|dataset_dict|config|state)\.json|(licen[cs]e|readme|requirements)(\.txt)?"
    r"|[^/]*\.(md|py))",
    re.IGNORECASE,
)
"""What stands beside the data: hidden files, `_SUCCESS` and `_delta_log/`, descriptions, documents, programs."""
DATA = re.compile(
    rf".*({'|'.join(map(re.escape, SUFFIXES))})({'|'.join(map(re.escape, COMPRESSIONS))})?", re.IGNORECASE
)
FORMATS_SHOWN = f".{', .'.join(FORMATS[:-1])} or .{FORMATS[-1]}"
SHARD = re.compile(r"data/(\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
SPLIT_WORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
MAX_SHOWN = 10


@dataclass(frozen=True)
class Wanted:
    """What a source asks for: `hf://datasets/OWNER/NAME/PATH?config=CONFIG&split=SPLIT`."""

    source: str
    """Without the query, as messages show it."""
    path: str = ""
    """A file, a directory, or a pattern in the data set; empty for all of it."""
    config: str | None = None
    split: str | None = None


def choose_files(names: Iterable[str], wanted: Wanted, card: Mapping[str, Any] | None = None) -> list[str]:
    """Return the names of the files that a source means, sorted. Raises UserError when a choice is missing or wrong.

    `names` are those of all files, relative to the data set; `card` is the data set's card, whose `configs` say which
    files belong to which configuration and split.
    """
    files = sorted(name for name in names if not NO_DATA.fullmatch(name))
    if wanted.path:
        if wanted.config is not None:
            problem = f"{wanted.source} names files, and ?config={wanted.config} as well"
            raise UserError(problem, "leave one of them out")
        files = _at_path(files, wanted.path)
    data_files = [name for name in files if DATA.fullmatch(name)]
    if data_files and len(data_files) < len(files):
        passed_over = _listed(name for name in files if not DATA.fullmatch(name))
        log.warning("fetch: %s: only %s files are read, not %s", wanted.source, FORMATS_SHOWN, passed_over)
    if wanted.path:
        if not data_files or (has_magic(wanted.path) and wanted.split is None):
            return data_files
        return _of_split(data_files, find_splits(data_files), wanted)
    if not data_files:
        raise UserError(f"{wanted.source} contains no {FORMATS_SHOWN} file", "append the file's name")
    # an old form of cards has only the names
    listed = [config for config in (card or {}).get("configs") or [] if isinstance(config, Mapping)]
    configs = {str(config.get("config_name", "default")): config for config in listed}
    if wanted.config is None and wanted.split is None and len(data_files) == 1:
        return data_files
    if wanted.config is not None and wanted.config not in configs:
        found = f"it has {_listed(configs)}" if configs else "it has no configurations"
        hint = did_you_mean(wanted.config, configs)
        raise UserError(f"{wanted.source} has no configuration '{wanted.config}'{hint}; {found}", "correct ?config=")
    if wanted.config is None and len(configs) > 1:
        first = next(iter(configs))
        raise UserError(
            f"{wanted.source} has {len(configs)} configurations ({_listed(configs)})",
            f"choose one: {wanted.source}?config={first}{f'&split={wanted.split}' if wanted.split else ''}",
        )
    if configs:
        config = wanted.config or next(iter(configs))
        data_files, splits = _splits_of_config(configs[config], data_files)
        if not splits:
            raise UserError(f"{wanted.source}: configuration '{config}' has no file of a format that tailtune reads",
                            "append a file's name")  # fmt: skip
    else:
        splits = find_splits(data_files)
    return _of_split(data_files, splits, wanted)


def local_files(source: str) -> list[Path] | None:
    """Return the files that `embedded` or a path refers to; None for an address. Raises UserError."""
    if source == "embedded":
        return [_embedded_file()]
    if "://" in source:
        return None
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            names = [file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()]
            return [path / name for name in choose_files(names, Wanted(str(path)))]
        if path.is_file():
            return [path]
        if files := matching_paths(path):
            return files
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user that does not exist
        raise UserError(f"data source {source[:300]} cannot be read: {one_line(error)}", "check the path") from None
    raise UserError(
        f"data source {path} does not exist",
        "give the path of a file as this step sees it, hf://datasets/OWNER/NAME, https://…, s3://BUCKET/KEY or "
        "'embedded'",
    )


def _embedded_file() -> Path:
    directory = Path(os.environ.get("TAILTUNE_EMBEDDED_DIR", "/opt/tailtune/data"))
    files = [path for path in sorted(directory.glob("*")) if path.is_file() and _is_data(path.name)]
    if len(files) != 1:
        names = ", ".join(path.name for path in files[:10]) or "none"
        raise UserError(
            f"source 'embedded' needs exactly one data file in {directory}, found {len(files)} ({names})",
            "build the image with one, or set TAILTUNE_EMBEDDED_DIR",
        )
    return files[0]


def _is_data(name: str) -> bool:
    return DATA.fullmatch(name) is not None and NO_DATA.fullmatch(name) is None


def find_splits(names: list[str]) -> dict[str, list[str]]:
    """Return the files of each split by their names; all are `train` when no name says otherwise.

    Files whose names belong to no split are in none where others do, as in `datasets`.
    """
    shards: dict[str, list[str]] = {}
    for name in names:
        if match := SHARD.fullmatch(name):
            shards.setdefault(match[1], []).append(name)
    if shards:
        order = list(SPLIT_WORDS)
        return dict(sorted(shards.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    for parts in (lambda name: name.split("/")[:-1], lambda name: name.split("/")[-1:]):
        splits = {
            split: [name for name in names if any(_has_word(part, words) for part in parts(name))]
            for split, words in SPLIT_WORDS.items()
        }
        if any(splits.values()):
            return {split: files for split, files in splits.items() if files}
    return {"train": names} if names else {}


def _has_word(part: str, words: str) -> bool:
    return re.search(rf"(?:^|[-._ 0-9])(?:{words})(?:set|s)?(?:[-._ 0-9]|$)", part, re.IGNORECASE) is not None


def _splits_of_config(config: Mapping[str, Any], names: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the files of a card's configuration, and those of each of its splits."""
    folder = _normal(str(config.get("data_dir") or ""))
    prefix = f"{folder}/" if folder else ""
    entries = config.get("data_files")
    if entries is None:
        inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        splits = {split: [prefix + name for name in files] for split, files in find_splits(inside).items()}
        return [prefix + name for name in inside], splits
    splits = {}
    for entry in [entries] if isinstance(entries, str) else entries:
        split, paths = (entry.get("split"), entry.get("path")) if isinstance(entry, Mapping) else (None, entry)
        for path in [paths] if isinstance(paths, str) else paths or []:
            splits.setdefault(str(split or "train"), []).extend(_at_path(names, _normal(prefix + path)))
    splits = {split: sorted(set(files)) for split, files in splits.items() if files}
    return sorted({name for files in splits.values() for name in files}), splits


def _normal(path: str) -> str:
    """Return a card's path without `./`; empty for the whole data set."""
    normal = posixpath.normpath(path).strip("/")
    return "" if normal == "." else normal


def _of_split(names: list[str], splits: dict[str, list[str]], wanted: Wanted) -> list[str]:
    """Return the files of the split that is asked for, or of the only one where no file belongs to none."""
    without = sorted(set(names).difference(*splits.values()))
    if wanted.split is None and len(splits) == 1 and not without:
        ((split, files),) = splits.items()
        if split != "train":
            log.info("fetch: %s: all files belong to the split '%s'", wanted.source, split)
        return files
    if wanted.split in splits:
        return splits[wanted.split]
    listed = ", ".join(f"{split}: {_listed(files)}" for split, files in splits.items())
    if wanted.split is not None:
        hint = did_you_mean(wanted.split, splits)
        raise UserError(f"{wanted.source} has no split '{wanted.split}'{hint}; it has {listed}", "correct ?split=")
    found = f"{len(splits)} split{'s' if len(splits) > 1 else ''} ({listed})"
    found += f", and files that belong to none ({_listed(without)})" if without else ""
    remedy = _how_to_choose(splits, wanted)
    if without and wanted.source.startswith("hf://"):
        remedy += ", or append a file's name or a pattern"
    raise UserError(f"{wanted.source} has {found}", remedy)


def _how_to_choose(splits: Mapping[str, list[str]], wanted: Wanted) -> str:
    first, files = next(iter(splits.items()))
    if not wanted.source.startswith("hf://"):
        return f"name the files, a folder, or a pattern, for example {wanted.source.rstrip('/')}/{files[0]}"
    query = f"config={wanted.config}&split={first}" if wanted.config else f"split={first}"
    return f"choose one: {wanted.source}?{query}"


def _at_path(names: list[str], path: str) -> list[str]:
    """Return the names that are a path, below it, or match its `*`, `**`, `?` and `[…]`."""
    if not path or path in names:
        return [path] if path else names
    if not has_magic(path):
        return [name for name in names if name.startswith(f"{path.rstrip('/')}/")]
    try:
        pattern = re.compile(_as_regex(path))
    except re.error:
        raise UserError(f"'{path}' is not a pattern", "write ranges in ascending order, as [a-z]") from None
    return [name for name in names if pattern.fullmatch(name)]


def _as_regex(pattern: str) -> str:
    """Return the regular expression of a glob in which `*` matches no `/`, and `**` does."""
    tokens = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    special = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(special.get(t) or (t.replace("[!", "[^") if t.startswith("[") else re.escape(t)) for t in tokens)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:MAX_SHOWN]) + (", …" if len(names) > MAX_SHOWN else "")
