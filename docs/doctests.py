"""Show the doctests of docstrings as code: our docstrings have them without a heading of their own."""

import re
from typing import Any

import griffe

# From a prompt to the next empty line, prompts and what they print.
_EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*(?:\n+>>> .*(?:\n.+)*)*", re.MULTILINE)


class FenceDoctests(griffe.Extension):
    """Put a fence around each run of doctests."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
