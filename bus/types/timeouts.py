"""How long each part of the bus waits for another."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Timeouts:
    """Time-outs and intervals, in seconds. ``Publisher`` and ``Subscriber`` each take one as ``timeouts``;
    a broker that a publisher starts for itself has the default."""

    default: ClassVar["Timeouts"]
    """The one that is used where none is given."""

    # -- requests and connections -------------------------------------------------------------------------------------

    answer: float = 5.0
    """How long a client waits for a broker's answer to a request."""
    handshake: float = 5.0
    """How long either side of a new connection waits for the other's part of the handshake."""
    silence: float = 5.0
    """How long a publisher or subscriber waits for any message of its broker before it connects anew."""
    probe: float = 0.5
    """How long a publisher with unacknowledged events waits for any message before it asks the broker for one."""

    # -- a publisher --------------------------------------------------------------------------------------------------

    welcome: float = 10.0
    """How long a new publisher waits for the broker's welcome."""
    hello_again: float = 2.0
    """How long a publisher that has lost its broker waits for a welcome before it says hello again."""
    listen: float = 0.05
    """How long a publisher publishes before it reads what the broker has sent."""
    poll: float = 0.02
    """How long :meth:`Publisher.wait` waits for a message of the broker."""
    report: float = 1.0
    """How long a publisher waits before it reports its statistics to the broker again."""
    log: float = 1.0
    """How long logged values wait for an event that they travel with."""
    flush: float = 5.0
    """How long closing a publisher waits for the next acknowledgement."""
    broker_start: float = 20.0
    """How long a publisher waits for a broker of its own to be ready."""
    broker_restarts: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0)
    """How long a publisher waits before it starts its broker again, by how often that has died in a row."""
    broker_steady: float = 10.0
    """How long a broker has to live for its next death to count as the first one."""
    broker_exit: float = 3.0
    """How long closing a publisher waits for its own broker to finish the recording."""
    copy: float = 2.0
    """How long it then waits until all of the run is in the NATS servers to which it is copied."""
    copy_poll: float = 0.05
    """How long it waits before it looks again whether that is so."""

    # -- a broker -----------------------------------------------------------------------------------------------------

    collect: float = 0.02
    """How long a broker receives before everything else has its turn."""
    record: float = 0.2
    """How long accepted events wait to be written to disk and acknowledged."""
    heartbeat: float = 0.5
    """How long subscribers wait for the next heartbeat of a run."""
    retransmit: float = 0.5
    """How long a broker waits for missing events before it requests them again."""
    retry_write: float = 0.5
    """How long a broker waits after a write error before it tries the disk again."""
    reject: float = 1.0
    """How long an unknown publisher waits for the next answer that says so."""
    lease: float = 5.0
    """How long a broker keeps a consumer's demand that is not renewed."""
    segment: float = 10.0
    """How long a broker keeps shared memory open for a remote consumer that does not read on."""
    first_run: float = 30.0
    """How long the broker of one run waits for its publisher to come."""
    join: float = 30.0
    """How long a run whose ranks have finished waits for ranks that have not come yet."""
    finished: float = 2.0
    """How long a finished run that was taken up again waits for its publishers to come back."""
    quiet: float = 0.2
    """How long nothing must have come after a publisher's process died for its stream to end as lost."""
    reap: float = 2.0
    """The longest that a broker waits for that silence."""
    unreachable: float = 60.0
    """How long a broker waits for a publisher that is not connected and whose process it cannot watch."""
    stalled: float = 300.0
    """How long a rank with a flight recorder publishes nothing before what it holds is written, unless the training is
    paused."""
    lock: float = 0.3
    """How long a broker waits for the lock of a run where asking about a lock means taking it for a moment."""

    # -- a subscriber -------------------------------------------------------------------------------------------------

    look: float = 0.5
    """How long a subscriber waits before it looks again whether the run is live."""
    renew: float = 1.0
    """How long a subscriber waits before it renews its lease."""
    fetch_poll: float = 0.05
    """How long a subscriber waits before it looks again whether a part of a recording has come from NATS."""
    on_disk: float = 0.02
    """How long a subscriber waits before it looks again for missing events in the recording."""
    gap: float = 5.0
    """How long a subscriber waits for missing events before they are a gap."""
    away: float = 0.1
    """How long a subscriber without a broker waits before it looks for one again."""
    trainer_return: float = 10.0
    """How long a subscriber waits for a trainer on another machine to find a broker again."""
    broker_return: float = 60.0
    """How long a subscriber, or a replay that is served, waits for a broker that does not answer."""
    outcome: float = 10.0
    """How long :meth:`Subscriber.command` waits for a command to take effect."""
    unconfirmed: float = 1.0
    """How long a command waits for the broker's confirmation before it is sent again."""
    undelivered: float = 0.2
    """How long a command waits before it is sent again to a broker that had no trainer to forward it to."""
    confirmation: float = 30.0
    """How long a subscriber looks often for the broker's answer to what it has sent."""
    confirmation_poll: float = 0.05
    """How long it waits before it looks again for that answer."""
    linger: float = 0.5
    """How long the last messages of a closed subscription wait to be sent."""

    # -- a replay that is served --------------------------------------------------------------------------------------

    taken: float = 5.0
    """How long a rank waits for the broker's sign that it has taken everything before it asks again."""
    last_words: float = 0.2
    """How long the last messages of a broker that has exited are waited for before another one is started."""
    replay_poll: float = 0.1
    """How long a replay waits for messages of its broker at a time."""


Timeouts.default = Timeouts()
