"""Parts of error messages.

An error message has three beats: what was given, what was expected, and what to write instead.
"""

import difflib
from collections.abc import Iterable


def nearest(word: str, words: Iterable[str]) -> str:
    """Suggest the word that was probably meant, as the end of a message; empty if none is close.

    >>> nearest("defualt", ["default", "fast"])
    " Did you mean 'default'?"
    >>> nearest("x", ["default", "fast"])
    ''
    """
    close = difflib.get_close_matches(word, list(words), 1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has no message.

    >>> first_line(RuntimeError("out of memory\\nmore"))
    'out of memory'
    >>> first_line(KeyboardInterrupt())
    'KeyboardInterrupt'
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def summary(error: BaseException) -> str:
    """The type of an error and the first line of its message, if it has one.

    >>> summary(ValueError("too long\\nmore"))
    'ValueError: too long'
    >>> summary(ValueError())
    'ValueError'
    """
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name
