"""Alerts about a loss or gradients that are not finite."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from offloop.bus.errors import ConfigurationError, check_choice
from offloop.bus.printing import say
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.runs.alerts import FIRING, RunAlert, note_alert
from offloop.bus.strict_json import plain
from offloop.bus.types.event import Event
from offloop.consumers.api.callback import Callback
from offloop.consumers.api.logger import Logger
from offloop.consumers.callbacks.shards import WholeNorms, of_rank


class NaNMonitor(Callback):
    """Alerts, or ends the training, when the loss or the norm of the gradients is NaN or infinite.

    Checks each ``BATCH_END``. Consecutive bad batches are one episode, reported once, in a line on standard error. From
    the first bad batch of an episode to the first good one after it, each logs

    - ``nan/loss`` and ``nan/gradients``: 1 where that is not finite, otherwise 0;
    - ``nan/batches``: the number of bad batches so far.

    The first bad batch of the run is logged as the table ``nan/first_bad_batch``: its number, loss, learning rates and
    gradient norms.

    Gradients of sharded weights are checked when all ranks have reported theirs, see :class:`OptimizerMonitor`: a stop
    may then come a batch later. With ``amp_fp16`` gradients are not checked: the scaler skips steps that are not finite
    to find its scale.

    Args:
        action: ``alert``, or ``stop`` to ask for the end of the training as well.
        check_gradients: check the gradients too, which takes their norm in each batch.
        per_parameter: check the gradient of each parameter.
    """

    barrier_events: tuple[Event, ...] = (Event.BATCH_END,)
    keeps: tuple[str, ...] = ("_attempt", "_bad_batches", "_in_episode", "_bad_loss_at", "_norms")

    def __init__(
        self, action: Literal["alert", "stop"] = "alert", check_gradients: bool = True, per_parameter: bool = False
    ) -> None:
        check_choice("action", action, ("alert", "stop"))
        if per_parameter and not check_gradients:
            raise ConfigurationError("per_parameter requires check_gradients")
        self._action = action
        if action != "stop":
            self.barrier_events = ()  # nothing to wait for
        self._norms = WholeNorms("gradient_norms" if per_parameter else "gradient_norm")
        self.fields: tuple[str, ...] = (self._norms.field,) if check_gradients else ()
        self.all_ranks = check_gradients
        self._attempt = 0
        self._bad_batches = 0
        self._in_episode = False
        self._bad_loss_at = -1  # a batch that is reported before its gradients are known

    def batch_end(self, state: Snapshot, logger: Logger) -> None:
        norms, batch = self._norms.whole(state) if self.fields else None, state.timestamp.values.batch
        loss = state.loss if state.rank == 0 else None
        bad_loss = loss is not None and not math.isfinite(loss)
        # A batch is judged when all ranks have reported its gradients, or before that by a bad loss.
        is_open = norms is None and (state.rank > 0 or (self._norms.open and not bad_loss))
        if is_open or (state.rank > 0 and batch == self._bad_loss_at):
            return
        if bad_loss:
            self._bad_loss_at = batch
            if norms is None and isinstance(own := state.get(self._norms.field), dict):
                norms = own.get("shards")
        gradients = _by_name(norms, state)
        bad_gradients = [name for name, norm in gradients.items() if not math.isfinite(norm)]
        # An episode of an earlier attempt, restored with its checkpoint, is reported again.
        was_in_episode = self._in_episode and state.attempt == self._attempt
        self._attempt, self._in_episode = state.attempt, bool(bad_loss or bad_gradients)
        self._bad_batches += self._in_episode
        if self._in_episode or was_in_episode:
            logger.log_metrics(
                {"nan/loss": int(bad_loss), "nan/gradients": int(bool(bad_gradients)), "nan/batches": self._bad_batches}
            )
        if self._in_episode and not was_in_episode:
            self._tell(_what(state, bad_loss, bad_gradients), state, logger)
        if self._in_episode and self._bad_batches == 1:
            _log_batch(state, gradients, logger)
        if self._in_episode and self._action == "stop":
            state.stop_training(f"nan: {' and '.join(_what(state, bad_loss, bad_gradients))}")

    def _tell(self, what: list[str], state: Snapshot, logger: Logger) -> None:
        rates = ", ".join(f"{name} {' '.join(f'{rate:g}' for rate in rates)}" for name, rates in state.lr.items())
        then = "; the training is asked to stop" if self._action == "stop" else ""
        where = f"run {state.run_name}, batch {state.timestamp.batch.value}"
        text = f"{' and '.join(what)}; learning rates {rates}{then}"
        say(f"{where}: {text}", err=True)
        batch, identity = state.timestamp.values.batch, f"nan-{state.attempt}-{state.seq}{of_rank(state)}"
        alert = RunAlert(identity, FIRING, identity, text, state.time, state.attempt, batch)
        note_alert(logger.context.run_dir, alert)


def _by_name(norms: Any, state: Snapshot) -> dict[str, float]:
    if norms is None or state.get("precision") == "amp_fp16":
        return {}
    return dict(norms) if isinstance(norms, Mapping) else {"all": norms}


def _log_batch(state: Snapshot, gradients: Mapping[str, float], logger: Logger) -> None:
    rows: list[list[Any]] = [["batch", state.timestamp.batch.value], ["loss", plain(state.loss)]]
    rows += [
        [f"lr/{name}/group{group}", plain(rate)] for name, rates in state.lr.items() for group, rate in enumerate(rates)
    ]
    rows += [[f"gradient_norm/{name}", plain(norm)] for name, norm in gradients.items()]
    logger.log_table(["what", "value"], rows, name="nan/first_bad_batch")


def _what(state: Snapshot, bad_loss: bool, bad_gradients: list[str]) -> list[str]:
    what = [f"the loss is {state.loss}"] if bad_loss else []
    if bad_gradients:
        some = "" if bad_gradients == ["all"] else f" of {', '.join(bad_gradients[:3])}"
        more = f" and {len(bad_gradients) - 3} more" if len(bad_gradients) > 3 else ""
        what.append(f"the gradients{some}{more} are not finite")
    return what
