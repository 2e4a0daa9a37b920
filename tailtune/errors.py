"""The one exception that is meant for the person who runs tailtune, and the words that messages share."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input or a bad environment: what is wrong, and what to do about it.

    Command lines print both as one line, without a traceback, and exit with a status other than 0. Any other
    exception is a fault of the program and keeps its traceback.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(f"{problem}; {remedy}" if remedy else problem)


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """`, did you mean 'epochs'?` for the most similar known name; empty when none is similar."""
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f", did you mean '{matches[0]}'?" if matches else ""


def one_line(error: BaseException, limit: int = 300) -> str:
    """The error's text on one line, cut to `limit` characters, without a full stop at the end."""
    text = " ".join(str(error).split())
    return (text if len(text) <= limit else f"{text[:limit]}…").rstrip(". ")
