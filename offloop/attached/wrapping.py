"""Hooks for methods of a framework that have none."""

import functools
from collections.abc import Callable
from typing import Any


class Wrapped:
    """Calls functions before and after a method of one object, with the method's arguments; ``after`` gets the result
    as its first argument."""

    def __init__(
        self,
        owner: Any,
        name: str,
        before: Callable[..., object] | None = None,
        after: Callable[..., object] | None = None,
    ) -> None:
        original = getattr(owner, name)
        self._owner, self._name = owner, name
        self._earlier = vars(owner).get(name)
        self._before, self._after = before, after

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._before is not None:
                self._before(*args, **kwargs)
            result = original(*args, **kwargs)
            if self._after is not None:
                self._after(result, *args, **kwargs)
            return result

        self._call = call
        setattr(owner, name, call)

    def remove(self) -> None:
        """Stop the calls, and restore the method unless it was wrapped again since."""
        self._before = self._after = None
        if vars(self._owner).get(self._name) is not self._call:
            return
        if self._earlier is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._earlier)
