"""Errors for the person who runs tailtune, and the one function that makes texts of others safe to show."""

import difflib
import errno
import re
from collections.abc import Iterable

MAX_PROBLEM = 2_000
"""Characters of an error's problem and of its remedy; the middle of a longer one is cut."""
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters but tab and newline, marks that change the direction of text, other line ends, surrogates."""
NO_SPACE = re.compile("No space left on device|Disk quota exceeded")
REMEDIES = {
    errno.ENOSPC: "make room there and run again",
    errno.EDQUOT: "raise the quota or delete something, and run again",
    errno.EROFS: "mount it writable, or choose another place",
    errno.EACCES: "check the owner and the permissions of the path and of its directories",
    errno.EPERM: "check the owner and the permissions of the path and of its directories",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.EIO: "check the disk or the volume, and run again",
    errno.ESTALE: "check the network volume, and run again",
}


class UserError(ValueError):
    """Bad input or a bad environment: what is wrong, and what to do about it.

    Command lines print both as one line, without a traceback, and exit with a status other than 0. `details` are lines
    that only the log shows, below the error. All texts may contain what others wrote: they are made printable here.
    """

    def __init__(self, problem: str, remedy: str = "", details: Iterable[str] = ()) -> None:
        self.problem, self.remedy = (_cut(printable(text, newline=False)) for text in (problem, remedy))
        self.details = tuple(printable(line, newline=False) for line in details)
        super().__init__(f"{self.problem}; {self.remedy}" if self.remedy else self.problem)


def printable(text: str, *, newline: bool = True) -> str:
    r"""Return the text with control characters, bidirectional marks and surrogates as escapes such as `\x1b`.

    Everything that is not tailtune's own passes here before it reaches a terminal or a log: it could clear the screen,
    hide what follows or, with `newline=False` where one line is meant, forge a line. A tab stays.
    """
    text = UNSAFE.sub(_escape, text)
    return text if newline else text.replace("\n", "\\n")


def _escape(found: "re.Match[str]") -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def _cut(text: str) -> str:
    if len(text) <= MAX_PROBLEM:
        return text
    half = MAX_PROBLEM // 2
    return f"{text[:half]} … {len(text) - MAX_PROBLEM:,} characters … {text[-half:]}"


def explain(error: BaseException) -> UserError:
    """Return any exception as an error for people: a full disk, a closed directory, too little memory, or a fault."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        where = f"{error.filename}: " if error.filename is not None else ""
        remedy = REMEDIES.get(error.errno, "check it and run again")
        return UserError(f"{where}{error.strerror}", remedy)
    if isinstance(error, MemoryError):
        return UserError("out of memory", "free some, or give this machine or step more")
    if isinstance(error, RecursionError):
        return UserError("something is nested too deeply", "look for brackets within brackets in the input")
    if isinstance(error, Exception) and (full := NO_SPACE.search(str(error))):  # of a library in another language
        return UserError(f"{full[0]}: {one_line(error)}", REMEDIES[errno.ENOSPC])
    return UserError(
        f"unexpected {type(error).__name__}: {one_line(error)}",
        "this is a fault of tailtune: please report it",
    )


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """`, did you mean 'epochs'?` for the most similar known name; empty when none is similar."""
    matches = difflib.get_close_matches(word[:200], list(known), n=1, cutoff=cutoff)
    return f", did you mean '{matches[0][:200]}'?" if matches else ""


def one_line(error: BaseException, limit: int = 300) -> str:
    """The error's text on one line, cut to `limit` characters, without a full stop at the end."""
    text = " ".join(str(error).split())
    return (text if len(text) <= limit else f"{text[:limit]}…").rstrip(". ")
