"""The one exception that means "the user can fix this"."""


class UserError(Exception):
    """Bad input, said in one line that names the value and the fix.

    The command line prints the message and exits with 2; no traceback is shown.
    """
