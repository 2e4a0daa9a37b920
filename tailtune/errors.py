"""The one exception that is meant for the person who runs tailtune."""


class UserError(ValueError):
    """Bad input or a bad environment, in one line that names what is wrong and the remedy.

    Command lines print the message alone and exit with a status that is not 0; everything else
    that is raised is a fault of the program and keeps its stack of frames.
    """
