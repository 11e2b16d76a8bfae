"""Which adapter a class of another framework is for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from offloop.bus.errors import ConfigurationError
from offloop.consumers.adapters.adapter import TrainingAdapter, adapted_class, root_of
from offloop.consumers.adapters.keras import KerasCallback
from offloop.consumers.adapters.lightning import LightningCallback, LightningLogger
from offloop.consumers.adapters.transformers import TransformersCallback
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import LoggerDestination

_CALLBACKS: tuple[type[TrainingAdapter], ...] = (TransformersCallback, KerasCallback, LightningCallback)
_INSTALL = {
    "keras": "keras torch",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "tensorflow": "tensorflow, or set KERAS_BACKEND=torch if Keras is what needs it",
    "transformers": "transformers torch",
}


def adapt_callback(found: Any) -> type[Callback] | None:
    """The class of ours for a class of callbacks of Transformers, Keras or Lightning; ``None`` for anything else.

    Raises :class:`offloop.bus.errors.ConfigurationError` for one that needs more than a consumer has."""
    for adapter in _CALLBACKS:
        if _is_of(found, adapter):
            adapter.check_class(found)
            return adapted_class(found, adapter)
    return None


def adapt_logger(found: Any) -> type[LoggerDestination] | None:
    """The class of ours for a class of loggers of Lightning; ``None`` for anything else."""
    return adapted_class(found, LightningLogger) if _is_of(found, LightningLogger) else None


@contextmanager
def naming_package() -> Iterator[None]:
    """Has the error at the import of a framework that is not installed say what to install."""
    try:
        yield
    except ConfigurationError as error:
        missing = getattr(error.__cause__, "name", None)
        if not isinstance(error.__cause__, ModuleNotFoundError) or missing not in _INSTALL:
            raise
        raise ConfigurationError(f"{error}: pip install {_INSTALL[missing]}", name=error.name) from error.__cause__


def _is_of(found: Any, adapter: Any) -> bool:
    return isinstance(found, type) and root_of(found, adapter.roots) is not None
