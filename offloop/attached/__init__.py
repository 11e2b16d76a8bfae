"""Common code of all adapters, which publish a training in another framework's loop. Begin with ``training``."""

from offloop.trainer.arguments import missing_extra

try:
    import torch  # noqa: F401
except ModuleNotFoundError as _error:
    raise ModuleNotFoundError(missing_extra("torch"), name=_error.name) from None
