"""What is marked in charts, where that stands, and what a chart's caption says of a metric: without a browser."""

import itertools

from offloop.bus import Event
from offloop.bus.protocol.snapshot import Snapshot
from offloop.bus.types.commands import Command, Outcome
from offloop.bus.types.timestamp import Timestamp
from offloop.consumers.api.logger import RunContext
from offloop.consumers.dashboard.view.marks import MOST_OF_A_KIND, Marks
from offloop.consumers.dashboard.view.run_view import RunView
from offloop.consumers.dashboard.web.charts import MarkNews

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND


def batch_of(batch: int) -> Snapshot:
    epoch, within = divmod(batch - 1, 10)
    at = Timestamp(epoch=epoch, batch=batch, sample=8 * batch, batch_in_epoch=within + 1)
    return Snapshot.build(
        Event.BATCH_END, seq=batch, time_ns=START + batch * SECOND, timestamp=at, dataloader_len=10, loss=1.0
    )


def test_a_mark_comes_when_the_batches_up_to_it_are_known_and_once() -> None:
    outcomes = [Outcome(Command("pause", id="a"), "batch_checkpoint", 2, None, START + 2 * SECOND)]
    run = RunView("run")
    run.open(RunContext("run", 1, None, answered=lambda: outcomes))
    browser = MarkNews()
    run.see(batch_of(1))
    assert browser.news([run]) == []
    run.see(batch_of(2))
    pause = ["pause", 2, 16, 0.2, 1.0, START / SECOND + 2]
    (news,) = browser.news([run])
    assert (news["r"], news["a"], [one[:6] for one in news["m"]]) == (0, 0, [pause])
    assert "'pause' took effect at batch 2" in news["m"][0][6]
    assert browser.news([run]) == []
    outcomes.append(Outcome(Command("set", ("lr", 1), "b"), "batch_checkpoint", 2, "there is no 'lr'"))
    (news,) = browser.news([run])
    assert (news["a"], [one[0] for one in news["m"]]) == (1, ["set"])
    browser.forget()
    assert [len(one["m"]) for one in browser.news([run])] == [2]


def test_a_further_attempt_is_marked_where_it_begins() -> None:
    for attempt, batch, texts in ((1, 0, []), (1, 30, ["attempt 1 begins"]), (2, 30, ["attempt 2 begins"])):
        view = RunView("run", attempt)
        at = batch_of(batch).timestamp if batch else Timestamp()
        view.see(Snapshot.build(Event.FIT_START, time_ns=START, timestamp=at))
        view.see(batch_of(31))
        assert [one.mark.text for one in view.marks().marks] == texts


def test_of_very_many_marks_some_are_kept_evenly_and_all_are_sent_anew() -> None:
    marks = Marks()
    marks.add("stop", 7, 0.0, "stopped")
    many = 10 * MOST_OF_A_KIND
    for batch in range(many):
        marks.add("evaluation", batch, float(batch), "evaluated")
    kept = [one.batch for one in marks.after(0) if one.kind == "evaluation"]
    gaps = {after - before for before, after in itertools.pairwise(kept)}
    assert MOST_OF_A_KIND / 2 <= len(kept) <= MOST_OF_A_KIND
    assert len(gaps) == 1
    assert kept[0] == 0
    assert many - kept[-1] <= max(gaps)
    assert [one.text for one in marks.after(0) if one.kind == "stop"] == ["stopped"]
    assert marks.generation > 0
    view = RunView("run")
    view.see(batch_of(1))
    browser, run = MarkNews(), view
    for count in range(MOST_OF_A_KIND + 1):
        view.take_outcome(Outcome(Command("checkpoint", id=str(count)), "batch_checkpoint", 1, None, START))
        (news,) = browser.news([run])
    assert (news["a"], len(news["m"])) == (0, MOST_OF_A_KIND // 2 + 1)
