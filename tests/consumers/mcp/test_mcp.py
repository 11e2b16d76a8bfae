"""Agents: what their clients get from runs by ``offloop mcp``, and what they may do."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx2
import psutil
import pytest
from helpers import wait_for
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import Implementation
from run_folders import WrittenRun, write_run

from offloop.bus import Event, Recording, find_run, list_runs
from offloop.bus.runs.run_file import BROKER_FILE
from offloop.consumers.dashboard.web.access import Tokens
from offloop.consumers.mcp.answers import MAX_ANSWER

pytestmark = pytest.mark.timeout(120)

_OFFLOOP = [sys.executable, "-m", "offloop"]
_UNKNOWN = ({}, {"authorization": "Bearer nobody"})
_SCRIPT = Path(__file__).parents[2] / "support" / "agent_runs.py"


@contextmanager
def training(name: str, factor: float) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, str(_SCRIPT), name, str(factor)], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: any(run.name == name and run.live for run in list_runs()), f"{name} to begin")
        yield process
    finally:
        process.terminate()
        process.wait(60)


class Agent:
    """A client with the answers of tools as values."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def text(self, tool: str, **arguments: Any) -> tuple[bool, str]:
        result = await self.client.call_tool(tool, arguments)
        (content,) = result.content
        assert len(content.text) <= MAX_ANSWER + 1000
        return bool(result.is_error), content.text

    async def ask(self, tool: str, **arguments: Any) -> Any:
        is_error, text = await self.text(tool, **arguments)
        assert not is_error, text
        return json.loads(text)

    async def refusal(self, tool: str, **arguments: Any) -> str:
        is_error, text = await self.text(tool, **arguments)
        assert is_error, text
        assert "Traceback" not in text
        return text


@asynccontextmanager
async def agent(*options: str, errors: Path | None = None) -> AsyncIterator[Agent]:
    """An agent that has started its own server."""
    server = StdioServerParameters(command=_OFFLOOP[0], args=[*_OFFLOOP[1:], "mcp", *options], env=dict(os.environ))
    with open(errors or os.devnull, "w") as log:
        async with Client(
            stdio_client(server, errlog=log), client_info=Implementation(name="tester", version="7")
        ) as one:
            yield Agent(one)


@pytest.fixture
def finished(runs_dir: Path) -> Path:
    for name, rate in (("slow", 0.01), ("fast", 0.5)):
        write_run(runs_dir, name, (1.0, 0.5, 0.25), 0.5 + rate, optimizer={"lr": rate})
    failed = WrittenRun(runs_dir, "failed", {"optimizer": {"lr": 2.0}}).train([1.0, 4.0, float("nan")])
    failed.end("failed", "ValueError: the loss is \x1b[31mnan")
    return runs_dir


def write_huge_run(runs_dir: Path) -> None:
    """Write a run with very much of everything."""
    run = WrittenRun(runs_dir, "huge", {f"group/{number}": "x" * 3000 for number in range(500)})
    names = [f"moe/layer_{number}/load" for number in range(3000)]
    for batch in range(200):
        run.batch += 1
        logged = [[batch, dict.fromkeys(names if batch % 50 == 0 else names[:1], float(batch))]]
        run.send(Event.BATCH_END, {"loss": 1.0 / (1 + batch), "logged": logged})
    run.end("failed", "x" * 100_000)


async def test_finished_runs_are_listed_compared_and_explained_in_bounded_answers(finished: Path) -> None:
    async with agent() as one:
        tools = {tool.name: tool for tool in (await one.client.list_tools()).tools}
        assert "command_run" not in tools
        assert all(tool.annotations.read_only_hint for tool in tools.values())
        assert all("untrusted data" in tool.description for tool in tools.values())

        found = await one.ask("list_runs", where="lr < 1", sort="-Accuracy", columns=["lr", "loss.min"])
        assert [list(item.values()) for item in found["items"]] == [["fast", 0.5, 0.25], ["slow", 0.01, 0.25]]
        assert (await one.ask("list_runs", count=2))["next"] == 2
        assert len((await one.ask("list_runs", first=2))["items"]) == 1

        compared = await one.ask("compare_runs", runs=["slow", "fast"], find="Accuracy")
        assert compared["hyperparameters"] == {"optimizer/lr": [0.01, 0.5]}
        assert compared["metrics"]["items"][0]["is_best"] == [False, True]

        explained = await one.ask("explain_run", run="failed")
        assert explained["status"] == "failed"
        assert explained["error"] == "ValueError: the loss is \\x1b[31mnan"
        assert "the run failed" in explained["last events"][-1][2]
        assert explained["not finite now"] == ["loss/train/total"]
        assert await one.ask("read_metrics", run="failed", names=["loss"]) == {
            "metrics": {"loss/train/total": [[0, 1.0], [1, 4.0], [2, "NaN"]]},
            "trouble": [],
        }
        waited = await one.ask("wait_for", runs={"failed": ""})
        assert "failed" in waited["runs"]["failed"]["ended"]

        write_huge_run(finished)
        metrics = await one.ask("list_metrics", run="huge", find="moe", count=200)
        assert metrics["total"] == 3000
        assert metrics["next"] == len(metrics["items"])
        later = await one.ask("list_metrics", run="huge", find="moe", first=2990)
        assert len(later["items"]) == 10
        points = (await one.ask("read_metrics", run="huge", names=["loss"], points=16))["metrics"]["loss/train/total"]
        assert points[0] == [0, 1.0]
        assert points[-1] == [199, 0.005]
        assert 8 <= len(points) <= 16
        near = await one.ask("read_metrics", run="huge", names=["loss"], first_step=100, last_step=102)
        assert [step for step, _ in near["metrics"]["loss/train/total"]] == [100, 101, 102]
        hyperparameters = await one.ask("show_run", run="huge", part="hyperparameters", count=200)
        assert 0 < hyperparameters["next"] < 200
        for tool, arguments in (("explain_run", {}), ("show_run", {})):
            await one.ask(tool, run="huge", **arguments)
        await one.ask("list_runs", columns=["error", "group/0", "group/1"])


async def test_wrong_arguments_are_named(finished: Path) -> None:
    async with agent("--allow", "stop") as one:
        for arguments, message in (
            ({"where": "lr >"}, "lr >"),
            ({"sort": "los"}, "no run has 'los'"),
            ({"count": 100_000}, "less than or equal to 200"),
            ({"filter": "lr > 1"}, "Extra inputs are not permitted"),
        ):
            assert message in await one.refusal("list_runs", **arguments)
        assert "did you mean fast" in await one.refusal("show_run", run="fas")
        # Other folders are out of reach.
        assert "no run" in await one.refusal("show_run", run="../runs/fast")
        assert "no metric 'los'" in await one.refusal("read_metrics", run="fast", names=["los"])
        assert "at least 1 item" in await one.refusal("read_metrics", run="fast", names=[])
        assert "row" in await one.refusal("read_table", run="fast", table="samples", row=10**30)
        assert "no tables" in await one.refusal("read_table", run="fast", table="samples")
        assert "at character" in await one.refusal("wait_for", runs={"fast": ""}, rules=["loss is low"])
        assert "pattern" in await one.refusal("wait_for", runs={"fast": "then"})
        starting = WrittenRun(finished, "starting")
        (starting.path / BROKER_FILE).unlink()
        assert "is starting" in await one.refusal("wait_for", runs={"starting": ""})
        starting.end()
        assert "reason" in await one.refusal("command_run", run="fast", command="stop")
        assert "not live" in await one.refusal("command_run", run="fast", command="stop", reason="for a test")


async def test_the_findings_of_many_runs_come_in_parts_without_a_loss(runs_dir: Path) -> None:
    cursors = {f"sweep-7-of-the-batch-size-{number:02}": "" for number in range(12)}
    for name in cursors:
        write_run(runs_dir, name, (3.0, 1.0) * 30)
    found = dict.fromkeys(cursors, 0)
    async with agent() as one:
        while cursors:
            waited = await one.ask("wait_for", runs=cursors, rules=["loss > 2"])
            assert waited["runs"].keys() == cursors.keys()
            for name, told in waited["runs"].items():
                found[name] += len(told.get("findings", []))
                cursors[name] = told["cursor"]
                if "ended" in told:
                    del cursors[name]
    assert set(found.values()) == {60}


async def refusal_is_explained(one: Agent) -> bool:
    events = (await one.ask("explain_run", run="good"))["last events"]
    assert not any("the run was" in text for _, _, text in events)
    return any("tester 7" in text and "to keep it" in text for _, _, text in events)


async def test_a_live_run_is_read_waited_for_and_stopped(runs_dir: Path, tmp_path: Path) -> None:
    reports: list[tuple[Any, ...]] = []

    async def report(*progress: Any) -> None:
        reports.append(progress)

    errors, rules = tmp_path / "errors", ["loss > 100", "grad_nrom > 9"]
    with training("good", 0.99) as good, training("bad", 1.1) as bad:
        async with agent("--allow", "stop,checkpoint", "--commands-per-hour", "2", errors=errors) as one:
            waited = await one.ask("wait_for", runs={"good": "", "bad": ""}, rules=rules)
            (finding,) = waited["runs"]["bad"]["findings"]
            assert (finding["rule"], finding["status"], finding["batch"]) == ("loss > 100", "firing", 49)
            assert waited["runs"]["bad"]["rules without a value"] == ["grad_nrom > 9"]
            rows = await one.ask("read_table", run="bad", table="samples", find="prompt 7", sort="-score")
            assert [row["prompt"] for row in rows["items"]] == ["prompt 17", "prompt 7"]
            assert rows["items"][1]["text"].startswith("\\x1b[31mred red")
            assert len(rows["items"][1]["text"]) < 200
            whole = await one.ask("read_table", run="bad", table="samples", row=rows["items"][1]["id"])
            assert len(whole["text"]) > 2000

            printed = await one.ask("read_console", run="bad")
            assert "batch " in printed["text"]
            earlier = await one.ask("read_console", run="bad", before=printed["before"])
            newest, oldest = (text.split()[1] for text in (earlier["text"].splitlines()[-1], printed["text"]))
            assert int(newest) == int(oldest) - 1
            assert "of ranks: [0]" in await one.refusal("read_console", run="bad", rank=7)

            assert "not allowed" in await one.refusal("command_run", run="bad", command="pause", reason="for a test")
            stopped = await one.ask("command_run", run="bad", command="stop", reason="the loss is above 100")
            assert stopped["took effect"]
            bad.wait(60)
            # From where it was: not the finding again.
            runs = {name: waited["runs"][name]["cursor"] for name in ("bad", "good")}
            ended = (await one.ask("wait_for", runs=runs, rules=rules))["runs"]["bad"]
            assert ended["ended"].startswith("stopped")
            assert "findings" not in ended

            arguments = {"runs": {"good": ""}, "rules": ["loss < 0"], "timeout": 2.5}
            result = await one.client.call_tool("wait_for", arguments, progress_callback=report)
            timed_out = json.loads(result.content[0].text)
            assert timed_out["timed out"]
            assert reports
            assert '"good"' in reports[-1][2]

            refused = await one.ask("command_run", run="good", command="checkpoint", reason="to keep it")
            assert not refused["took effect"]
            assert "2 commands an hour" in await one.refusal("command_run", run="good", command="stop", reason="enough")
            # The outcome is answered before the broker has written it.
            with anyio.fail_after(60):
                while not await refusal_is_explained(one):
                    await anyio.sleep(0.1)
        assert good.poll() is None
    (sent,) = Recording(find_run("bad").recording).read_commands()
    who, why = str(sent.command.reason).split(": ", 1)
    assert (sent.command.name, why, sent.error) == ("stop", "the loss is above 100", None)
    assert who.startswith("offloop mcp for tester 7 by ")
    assert sent.batch
    assert "the loss is above 100" in errors.read_text()


async def test_a_stall_ends_a_wait_and_a_signal_the_commands(runs_dir: Path) -> None:
    with training("hangs", 0.99):
        async with agent("--allow", "stop") as one:
            (runs_dir / "hangs" / "hang").touch()
            stalled = (await one.ask("wait_for", runs={"hangs": ""}, stall_seconds=1.5))["runs"]["hangs"]
            assert "findings" in stalled, stalled
            assert [(found["rule"], found["status"]) for found in stalled["findings"]] == [("stall", "firing")]
            (runs_dir / "hangs" / "hang").unlink()
            resolved = await one.ask("wait_for", runs={"hangs": stalled["cursor"]}, stall_seconds=1.5)
            assert resolved["runs"]["hangs"]["findings"][0]["status"] == "resolved"
            # Other children may be zombies, which have no command line.
            children = psutil.Process().children(recursive=True)
            servers = [one for one in children if "--allow" in (one.as_dict(["cmdline"])["cmdline"] or ())]
            servers[0].send_signal(signal.SIGUSR1)
            assert "read-only" in await one.refusal("command_run", run="hangs", command="stop", reason="for a test")


@asynccontextmanager
async def connected(url: str, token: str) -> AsyncIterator[Agent]:
    headers = {"authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=60) as http,
        Client(streamable_http_client(url, http_client=http)) as one,
    ):
        yield Agent(one)


async def test_http_asks_for_the_tokens_of_a_dashboard(runs_dir: Path, tmp_path: Path) -> None:
    tokens, log = tmp_path / "tokens.txt", tmp_path / "log"
    with training("live", 0.99), open(log, "wb") as output:
        server = subprocess.Popen(
            [*_OFFLOOP, "mcp", "--http", "0", "--allow", "stop", "--tokens", str(tokens)], stderr=output
        )
        try:
            url = wait_for(lambda: next(iter(log.read_text().split("mcp: ")[1:]), ""), "the server's address").split()[
                0
            ]
            given = Tokens.load(tokens)
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
            assert [httpx2.post(url, json=request, headers=one).status_code for one in _UNKNOWN] == [401, 401]
            async with connected(url, given.view) as one:
                assert (await one.ask("list_runs"))["total"] == 1
                assert "for viewing" in await one.refusal(
                    "command_run", run="live", command="stop", reason="for a test"
                )
            async with connected(url, given.command) as one:
                assert (await one.ask("command_run", run="live", command="stop", reason="for a test"))["took effect"]
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(60)
    (outcome,) = Recording(find_run("live").recording).read_commands()
    assert "at 127.0.0.1" in str(outcome.command.reason)
