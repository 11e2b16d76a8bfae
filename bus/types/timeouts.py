"""The times that parts of the bus wait for each other."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Timeouts:
    """Time-outs and intervals, in seconds. ``Publisher`` and ``Subscriber`` each take one as ``timeouts``;
    a broker that a publisher starts for itself has the default."""

    default: ClassVar["Timeouts"]
    """Used where none is given."""

    answer: float = 5.0
    """Longest wait of a client for a broker's answer to a request."""
    silence: float = 5.0
    """Longest silence of a broker before a publisher or subscriber reports it, or connects anew."""
    welcome: float = 10.0
    """Longest wait of a new publisher for the broker's welcome."""
    broker_start: float = 20.0
    """Longest wait of a publisher for a broker of its own to be ready."""
    flush: float = 5.0
    """Longest wait for the next acknowledgement when a publisher is closed."""
    broker_exit: float = 3.0
    """Longest wait for a publisher's own broker to finish the recording when the publisher is closed."""
    gap: float = 5.0
    """Longest wait of a subscriber for missing events before they are a gap."""
    broker_return: float = 60.0
    """Longest wait of a subscriber, or of a replay that is served, for a broker that does not answer."""

    # -- a publisher --------------------------------------------------------------------------------------------------

    handshake: float = 5.0  # for the other side's part of the handshake of a new connection
    probe: float = 0.5  # without a message before a broker with unacknowledged events is asked for one
    hello_again: float = 2.0  # without a welcome before a publisher that lost its broker repeats its hello
    listen: float = 0.05  # of publishing between two looks at the broker's messages
    poll: float = 0.02  # for a message of the broker, in Publisher.wait()
    report: float = 1.0  # between two reports of statistics to the broker
    log: float = 1.0  # that logged values wait for an event to travel with
    broker_restarts: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)  # before a restart, by deaths in a row
    broker_steady: float = 10.0  # of life after which a broker's next death counts as the first one
    last_words: float = 0.2  # for the last messages of a broker that has exited, before another one is started
    copy: float = 2.0  # at the end, for the rest of the run to be in the NATS servers
    copy_poll: float = 0.05  # between two looks at that

    # -- a broker -----------------------------------------------------------------------------------------------------

    collect: float = 0.02  # of receiving before everything else has its turn
    record: float = 0.2  # that accepted events wait to be written to disk and acknowledged
    heartbeat: float = 0.5  # between two heartbeats of a run
    retransmit: float = 0.5  # before missing events are requested again
    retry_write: float = 0.5  # after a write error before the disk is tried again
    reject: float = 1.0  # between two answers to a publisher that is not known
    lease: float = 5.0  # that a consumer's demand is kept without being renewed
    segment: float = 10.0  # that shared memory stays open for a remote consumer that does not read on
    first_run: float = 30.0  # for the publisher of the broker's run to come
    join: float = 30.0  # for ranks that have not come yet, when all others have finished
    finished: float = 2.0  # for the publishers of a finished run that was taken up again
    quiet: float = 0.2  # of silence after a publisher's process died before its stream ends as lost
    reap: float = 2.0  # at most, for that silence
    unreachable: float = 60.0  # for a publisher that is not connected and whose process cannot be watched
    stalled: float = 300.0  # without an event of a rank, other than in a pause, before its flight recorder is written
    lock: float = 0.3  # for the lock of a run, where asking about a lock means taking it for a moment

    # -- a subscriber -------------------------------------------------------------------------------------------------

    look: float = 0.5  # between two looks whether the run is live
    renew: float = 1.0  # between two renewals of its lease
    fetch_poll: float = 0.05  # between two looks for a part of a recording in NATS
    on_disk: float = 0.02  # between two looks for missing events in the recording
    away: float = 0.1  # between two looks for a broker
    trainer_return: float = 10.0  # for a trainer on another machine to find a broker again
    outcome: float = 10.0  # for a command to take effect, in Subscriber.command()
    unconfirmed: float = 1.0  # without the broker's confirmation before a command is sent again
    undelivered: float = 0.2  # before a command is sent again to a broker that had no trainer to forward it to
    confirmation: float = 30.0  # of looking often for the broker's answer
    confirmation_poll: float = 0.05  # between two such looks
    linger: float = 0.5  # that the last messages of a closed subscription wait to be sent

    # -- a replay that is served --------------------------------------------------------------------------------------

    taken: float = 5.0  # for the broker's sign that it has taken everything, before a rank asks again
    replay_poll: float = 0.1  # for messages of the broker at a time


Timeouts.default = Timeouts()
