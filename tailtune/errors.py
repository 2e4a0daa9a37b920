"""The one exception that is meant for the person who runs tailtune."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input or a bad environment, in one line that names what is wrong and the remedy.

    Command lines print the message alone and exit with a status that is not 0; everything else
    that is raised is a fault of the program and keeps its stack of frames.
    """


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5) -> str:
    """`, did you mean 'epochs'?`, or nothing when no known name is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f", did you mean '{found[0]}'?" if found else ""
