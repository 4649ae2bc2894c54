"""Named scopes and the globs over them: one meaning for policies, reports and checks.

A path is the tuple of scopes around an operation, outermost first. A key without a slash is matched against one scope;
a glob with a slash is matched against a path from its start or from any scope on: `"*/attention"` and `"attention/*"`
both cover `block/attention/scores`.
"""

import fnmatch
from collections.abc import Sequence


def is_glob(key: str) -> bool:
    return any(c in key for c in "*?[/")


def matches(key: str, path: Sequence[str]) -> bool:
    """Whether a key is about the last scope of a path.

    >>> matches("*/attention", ("block", "attention")), matches("*/attention", ("block", "attention", "scores"))
    (True, False)
    """
    if "/" not in key:
        return fnmatch.fnmatchcase(path[-1], key)
    text = "/" + "/".join(path)
    return any(fnmatch.fnmatchcase(t, g) for t in (text, text + "/") for g in (key, "*/" + key))


def covers(key: str, path: Sequence[str]) -> bool:
    """Whether a key is about some scope of a path, and so about everything inside of it. `"*"` covers all paths.

    >>> covers("*/attention", ("block", "attention", "scores")), covers("*", ()), covers("head", ())
    (True, True, False)
    """
    return key == "*" or any(matches(key, path[:depth]) for depth in range(1, len(path) + 1))
