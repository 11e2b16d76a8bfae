"""Methods of a framework's objects that have no hook."""

import functools
from collections.abc import Callable
from typing import Any


class Wrapped:
    """Calls functions before and after a method of one object, with the method's arguments, until it is removed;
    ``after`` is given what the method has returned before them."""

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
        """Calls them no more; the method is what it was, unless another one has wrapped it since."""
        self._before = self._after = None
        if vars(self._owner).get(self._name) is not self._call:
            return
        if self._earlier is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._earlier)
