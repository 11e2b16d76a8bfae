"""The names that a training script needs.

    from offloop import Callback, Event, Image, Publisher, Trainer, join, runs, watch

They are loaded at first use, so that a machine without torch can import this package. ``offloop.bus``,
``offloop.trainer`` and ``offloop.consumers`` have the rest."""

# Nothing is imported here: Ctrl-C shows a traceback until a command's module handles it.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from offloop.bus import Event, Image, Publisher, Recording, Snapshot, Subscriber
    from offloop.bus.publisher.actor import join
    from offloop.consumers import Callback, Logger, LoggerDestination, Row, RunContext
    from offloop.folder import runs
    from offloop.own_loop import watch
    from offloop.trainer import Algorithm, Trainer

    __version__: str

__all__ = [
    "Algorithm",
    "Callback",
    "Event",
    "Image",
    "Logger",
    "LoggerDestination",
    "Publisher",
    "Recording",
    "Row",
    "RunContext",
    "Snapshot",
    "Subscriber",
    "Trainer",
    "join",
    "runs",
    "watch",
]


if not TYPE_CHECKING:  # with it a type checker accepts any name

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from importlib.metadata import version

            return version(__name__)
        from offloop.bus.lazy import lazy_exports
        from offloop.trainer.arguments import explain_missing

        load, _, _ = lazy_exports(__name__, explain_missing)
        return load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
