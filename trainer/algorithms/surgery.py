"""Changes to the modules of a model that leave its parameters, and their names, as they are."""

from torch import nn

__all__ = ["change_behavior"]


def change_behavior(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Makes a module behave as ``mixin`` says, before its own class is asked: the mixin's methods call those of the
    class by ``super()``.

    The module stays the same object, with its parameters, hooks and its place in the model, so that optimizers,
    checkpoints and names go on working. It is an instance of its own class and of the mixin. As with
    ``torch.nn.utils.parametrize``, which works in this way too, the whole module cannot be pickled any more; its
    ``state_dict()`` can."""
    bases = (mixin, type(module))
    if not isinstance(module, mixin):
        if bases not in _combined:
            _combined[bases] = type(f"{mixin.__name__}{bases[1].__name__}", bases, {})
        module.__class__ = _combined[bases]


_combined: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}
