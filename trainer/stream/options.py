"""What a trainer is told about its stream, checked before anything is started."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bus.errors import ConfigurationError
from bus.net.curve import ClientSecurity, client_security, client_security_for
from bus.publisher.publisher import check_backlog_bytes
from bus.types.demand import BASE_EVENTS, Demand
from bus.types.event import Event
from trainer.arguments.checks import as_list, check_config, check_max_delay, check_path, check_record
from trainer.fields.field import FieldFunction
from trainer.fields.registry import FieldRegistry, check_fields
from trainer.stream.attached import check_picklable, demand_of
from trainer.stream.barrier import check_wait_for


class StreamOptions(NamedTuple):
    """The arguments of :class:`trainer.Trainer` about its stream, as :func:`check_stream_options` gives them."""

    publish: bool
    runs_dir: str | os.PathLike[str] | None
    broker: str | None
    key: str | None
    broker_key: str | None
    security: ClientSecurity | None
    """The keys, where that broker takes them."""
    always: Demand
    """What is published in any case."""
    max_delay: float
    backlog_bytes: int
    config: dict[str, Any]
    fields: FieldRegistry
    callbacks: list[Any]
    loggers: list[Any]
    waits_for: frozenset[str]
    wait_seconds: float


def check_stream_options(
    *,
    publish: bool,
    runs_dir: str | os.PathLike[str] | None,
    broker: str | None,
    key: str | None,
    broker_key: str | None,
    record: str | Iterable[Event | str] | None,
    max_delay: float,
    backlog_bytes: int,
    config: Mapping[str, Any] | None,
    fields: Mapping[str, FieldFunction] | None,
    callbacks: Any | Sequence[Any] | None,
    loggers: Any | Sequence[Any] | None,
    wait_for: str | Sequence[str] | None,
    wait_seconds: float,
) -> StreamOptions:
    """The arguments of :class:`trainer.Trainer` of the same names.

    Raises :class:`bus.errors.ConfigurationError` for one that is not allowed, or not together with another."""
    security = _check_keys(broker, key, broker_key)
    check_backlog_bytes(backlog_bytes)
    if runs_dir is not None:
        check_path(runs_dir, "runs_dir")
    callbacks, loggers = as_list(callbacks, object, "callbacks"), as_list(loggers, object, "loggers")
    return StreamOptions(
        publish,
        runs_dir,
        broker,
        key,
        broker_key,
        security,
        Demand.merge([Demand.of(BASE_EVENTS | check_record(record)), _check_consumers(callbacks, loggers, publish)]),
        check_max_delay(max_delay),
        backlog_bytes,
        check_config(config),
        check_fields(fields),
        callbacks,
        loggers,
        check_wait_for(wait_for, wait_seconds, publish, callbacks),
        wait_seconds,
    )


def _check_keys(broker: str | None, key: str | None, broker_key: str | None) -> ClientSecurity | None:
    if broker is not None:
        return client_security(key, broker_key) if key or broker_key else client_security_for(broker)
    if key or broker_key:
        raise ConfigurationError(
            "key and broker_key are for a broker that stands alone: name that with broker= (--broker)"
        )
    return None


def _check_consumers(callbacks: list[Any], loggers: list[Any], publish: bool) -> Demand:
    if (callbacks or loggers) and not publish:
        raise ConfigurationError("callbacks and loggers are fed by the stream: leave out publish=False, or them")
    check_picklable(callbacks, "callbacks")
    check_picklable(loggers, "loggers")
    return demand_of(callbacks)
