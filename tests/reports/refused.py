"""expect(): a call has to be refused, with these words."""

from __future__ import annotations

import re
from typing import Any, Callable


def expect(kind: type[BaseException], words: str, function: Callable[..., Any], *args: Any, **kw: Any) -> str:
    """The text of the error; `words` is a regular expression."""
    try:
        function(*args, **kw)
    except kind as error:
        assert re.search(words, str(error)), f"{error!r} has no {words!r}"
        assert "\n" not in str(error), f"more than one line: {error!r}"
        return str(error)
    raise AssertionError(f"{function} accepted {args} {kw}")
