"""The containers. There is no engine here: the services' own commands run side by side as processes of this machine, in
the order and with the environment that docker-compose.yml and the Dockerfile give them. Only

- a folder is the one of the same name below the test's own,
- addresses for all interfaces, and names of services, are 127.0.0.1,
- ports are free ones.
"""

import os
import re
import shlex
import signal
import ssl
import stat
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from brokers import free_address
from helpers import wait_for
from paths import ROOT

from bus import find_run
from bus.checkpoints.image import read_contents

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
OURS = [name for name, service in SERVICES.items() if service["image"].startswith("offloop-")]
DOCKERFILE = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WATCHING = ("consumer", "checkpoint", "tensorboard-writer", "prometheus-exporter")
KEYS = {"broker", "trainer", "viewer", "commander", "dashboard"}
PATIENCE = 60.0


def instructions(kind: str) -> list[str]:
    """What stands in the Dockerfile behind each instruction of a kind."""
    return re.findall(rf"^{kind} (.+)$", DOCKERFILE, re.MULTILINE)


def stages() -> dict[str, str]:
    """The Dockerfile's stages, and what each begins with."""
    return {name: base for base, name in (line.split(" AS ") for line in instructions("FROM"))}


def words(command: str | Sequence[str]) -> list[str]:
    """A command in the parts that Compose gives it."""
    return shlex.split(command) if isinstance(command, str) else list(command)


def interpolated(text: str, variables: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: variables.get(found[1], found[2]), text)


def mounts(service: Mapping[str, Any]) -> dict[str, str]:
    """What is mounted where in a service: folder to volume."""
    return {target: source for source, target, *_ in (volume.split(":") for volume in service.get("volumes", []))}


def image_environment() -> dict[str, str]:
    pairs = [pair.split("=", 1) for line in instructions("ENV") for pair in shlex.split(line)]
    return {name: value for name, value in pairs if name != "PATH"}


class Services:
    """The services of docker-compose.yml as processes below a folder."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self._folder = folder
        self.variables = variables
        """What the shell would have set."""
        self._ports = {port: free_address().rpartition(":")[2] for port in ("5570", "6006", "8420", "9464")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        targets = {target for name in OURS for target in mounts(SERVICES[name])}
        # A volume takes over the mode of the image's folder.
        for target in (*targets, "/home"):
            self.path(target).mkdir(mode=0o700, parents=True)
        tops = "|".join(sorted({target.split("/")[1] for target in targets}))
        names = "|".join(SERVICES)
        self._rules: list[tuple[str, Callable[[re.Match[str]], str]]] = [
            (rf"(?<![\w/.])/(?:{tops})(?![\w-])", lambda found: str(self.path(found[0]))),
            (rf"(?<=//)(?:\*|{names})(?=:)|\b0\.0\.0\.0\b", lambda _: "127.0.0.1"),
            (rf"\b(?:{'|'.join(self._ports)})\b", lambda found: self._ports[found[0]]),
        ]

    def path(self, folder: str) -> Path:
        """Where a folder of the containers is."""
        return self._folder / folder.lstrip("/")

    def port(self, number: int) -> int:
        """Where a port of the containers is."""
        return int(self._ports[str(number)])

    def mapped(self, text: str) -> str:
        """A text of docker-compose.yml, for here."""
        text = interpolated(text, self.variables)
        for pattern, replacement in self._rules:
            text = re.sub(pattern, replacement, text)
        return text

    def up(self, *names: str) -> None:
        """Starts services, each after those that it depends on, as Compose does."""
        for name in names:
            if self.is_running(name):
                continue
            depends: dict[str, dict[str, str]] = SERVICES[name].get("depends_on", {})
            self.up(*re.findall("^service:(.+)", SERVICES[name].get("pid", "")))
            for other, how in depends.items():
                if how["condition"] != "service_completed_successfully" or other not in self._processes:
                    self.up(other)
                if how["condition"] == "service_completed_successfully":
                    assert self._processes[other].wait(PATIENCE) == 0, self.said(other)
                elif how["condition"] == "service_healthy":
                    self.wait_until_healthy(other)
            with open(self._log(name), "wb") as log:
                self._processes[name] = subprocess.Popen(
                    self._command(SERVICES[name]["command"]),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self.path("/home"),
                    env=self._environment(name),
                )

    def wait_until_healthy(self, name: str) -> None:
        """Waits until the service's own health check succeeds."""

        def check() -> bool:
            assert self.is_running(name), f"{name} has ended: {self.said(name)}"
            test, *command = SERVICES[name]["healthcheck"]["test"]
            assert test == "CMD"
            return subprocess.run(self._command(command), env=self._environment(name), check=False).returncode == 0

        wait_for(check, f"{name} to be healthy", PATIENCE)

    def wait_until_said(self, name: str, text: str) -> None:
        """Waits until a service has written something since it was last started."""

        def look() -> bool:
            found = text in self.said(name)
            assert found or self.is_running(name), f"{name} has ended: {self.said(name)}"
            return found

        wait_for(look, f"{name} to say {text!r}", PATIENCE)

    def is_running(self, name: str) -> bool:
        """Whether a service was started and has not ended."""
        return name in self._processes and self._processes[name].poll() is None

    def ended(self, name: str) -> int:
        """The exit code of a service that ends by itself."""
        return self._processes[name].wait(PATIENCE)

    def stop(self, name: str) -> int:
        """Ends a service as the engine does, and returns its exit code."""
        (stop_signal,) = instructions("STOPSIGNAL")
        self._processes[name].send_signal(signal.Signals[stop_signal])
        return self.ended(name)

    def close(self) -> None:
        """Ends what is there still, and shows what all have written."""
        for name, process in self._processes.items():
            process.kill()
            process.wait()
            print(f"-- {name}, exit code {process.returncode}\n{self.said(name)}")

    def said(self, name: str) -> str:
        """What a service has written since it was last started."""
        return self._log(name).read_text(errors="replace")

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _command(self, command: str | Sequence[str]) -> list[str]:
        program, *arguments = [self.mapped(word) for word in words(command)]
        found = next((path for path in (ROOT / "containers" / program, _installed(program)) if path.exists()), program)
        return [str(found), *arguments]

    def _environment(self, name: str) -> dict[str, str]:
        given = image_environment() | SERVICES[name].get("environment", {})
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "HOME": str(self.path("/home")), "OMP_NUM_THREADS": "1"}
        return (
            own | {"OFFLOOP_TEST": os.environ["OFFLOOP_TEST"]} | {key: self.mapped(text) for key, text in given.items()}
        )


def _installed(program: str) -> Path:
    return Path(sys.executable).parent / program


def shows(url: str, text: str) -> bool:
    """Whether a page is there and has a text on it."""
    try:
        return text in fetch(url)
    except OSError:
        return False


def fetch(url: str, context: ssl.SSLContext | None = None) -> str:
    """A page, for whoever keeps cookies."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPCookieProcessor()]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    with urllib.request.build_opener(*handlers).open(url, timeout=30) as answer:
        return str(answer.read().decode())


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    made = Services(tmp_path, DURATION="10000ep")
    yield made
    made.close()


@pytest.mark.timeout(180)
def test_the_services_work_together(services: Services) -> None:
    services.up("trainer", "tensorboard", "prometheus-exporter")
    for path in services.path("/keys").rglob("*"):
        is_public = path.suffix == ".key"
        assert stat.S_IMODE(path.stat().st_mode) & (0o022 if is_public else 0o077) == 0, path

    services.wait_until_said("consumer", "throughput/batches_per_sec")
    services.wait_until_said("consumer", "lr-AdamW/group0")
    saved = services.path("/checkpoints/consumer/digits/latest-rank0.safetensors")
    wait_for(saved.exists, "a checkpoint", PATIENCE)
    tree = (read_contents(saved) or {})["tree"]
    assert tree["run"]["name"] == "digits"

    services.wait_until_healthy("dashboard")
    look_at_the_dashboard(services)
    metrics = f"http://127.0.0.1:{services.port(9464)}/metrics"
    wait_for(lambda: shows(metrics, "throughput_batches_per_sec{"), "throughput in Prometheus", PATIENCE)
    services.wait_until_healthy("tensorboard")
    tags = f"http://127.0.0.1:{services.port(6006)}/data/plugin/scalars/tags"
    wait_for(lambda: shows(tags, "lr-AdamW/group0"), "learning rates in TensorBoard", PATIENCE)

    # Whoever watches sees the trainer's end, and ends after it.
    assert services.stop("trainer") == 130
    assert "stopping after this batch, with a checkpoint" in services.said("trainer")
    for name in WATCHING:
        assert services.ended(name) == 0, services.said(name)
    assert "run digits stopped" in services.said("consumer")
    look_at_the_dashboard(services)

    # All that is kept is in volumes: the next start goes on from there.
    latest = services.path("/checkpoints/trainer/digits/latest-rank0.safetensors")
    # Long enough for a consumer to come and ask for a checkpoint.
    epochs = int(os.readlink(latest).partition("-")[0].removeprefix("ep")) + 40
    services.variables["DURATION"] = f"{epochs}ep"
    services.up("consumer", "checkpoint")
    for name in ("consumer", "checkpoint"):
        services.wait_until_said(name, "waiting for a run")
    services.up("trainer")
    assert services.ended("trainer") == 0
    assert "attempt 2, going on from" in services.said("trainer")
    for name in ("consumer", "checkpoint"):
        assert services.ended(name) == 0, services.said(name)
    assert os.readlink(saved).startswith(f"ep{epochs}-")
    run = find_run("digits", services.path("/runs"))
    assert [attempt.status for attempt in run.attempts] == ["stopped", "finished"]
    for name, code in {"dashboard": 0, "broker": 0, "pause": -signal.SIGTERM, "tensorboard": 0}.items():
        assert services.stop(name) == code, name


def look_at_the_dashboard(services: Services) -> None:
    """By TLS, with its own certificate, and a token."""
    folder = services.path("/keys/dashboard")
    tokens = dict(line.split() for line in (folder / "tokens").read_text().splitlines())
    page = f"https://localhost:{services.port(8420)}/"
    context = ssl.create_default_context(cafile=folder / "certificate.pem")
    for token in tokens.values():
        assert "<html" in fetch(f"{page}?token={token}", context)
    for stranger in (page, f"{page}?token=guessed"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            fetch(stranger, context)
    with pytest.raises(urllib.error.URLError, match="self-signed certificate"):
        fetch(f"{page}?token={tokens['view']}")


def test_the_dockerfile_names_what_there_is() -> None:
    names, extras = stages(), PROJECT["optional-dependencies"]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*"
    for line in instructions("COPY"):
        *sources, _target = [word for word in line.split() if not word.startswith("--")]
        if stage := re.search(r"--from=(\S+)", line):
            assert stage[1] in names
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source.split('/')[0]}" in ignored, source
    for line in instructions("RUN"):
        for stage in re.findall(r"from=([\w-]+)", line):
            assert stage in names
        for extra in re.findall(r'"\.\[(\w+)\]"', line):
            assert extra in extras
    given = [service["build"].get("args", {}) for service in SERVICES.values() if "build" in service]
    (default,) = re.findall(r"^ARG EXTRAS=(\S+)", DOCKERFILE, re.MULTILINE)
    for asked in (default, *(args["EXTRAS"] for args in given if "EXTRAS" in args)):
        assert set(asked.split(",")) <= set(extras), asked


def test_the_images_are_pinned_and_run_as_nobody_in_particular() -> None:
    installing = [
        part for line in instructions("RUN") for part in line.split("&&") if re.search(r"pip .*\binstall ", part)
    ]
    assert installing
    assert all("--constraint constraints.txt" in part or "--no-index" in part for part in installing)
    assert re.search(r"^ARG BASE=\S+:\S*\d\S*$", DOCKERFILE, re.MULTILINE)
    assert {base for base in stages().values() if base not in stages()} == {"${BASE}"}
    finals = {service["build"]["target"] for service in SERVICES.values() if "build" in service}
    assert finals == {"consumer", "trainer"}
    for name in finals:
        last = re.split(rf"^FROM \S+ AS {name}$", DOCKERFILE, flags=re.MULTILINE)[1].split("\nFROM ")[0]
        assert re.findall(r"^USER (\d+):\d+$", last, re.MULTILINE) == ["10001"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_more_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert "healthcheck" in service or "ports" not in service
    # Nobody has a secret key of somebody else's; the viewer's is the broker's for its health check.
    owned = {
        "keys": KEYS,
        "broker": {"broker", "viewer"},
        "trainer": {"trainer"},
        "dashboard": {"commander", "dashboard"},
    }
    held = {source.removeprefix("keys-") for source in mounts(service).values() if source.startswith("keys-")}
    assert held <= owned.get(name, {"viewer"})


@pytest.mark.parametrize("name", OURS)
def test_what_a_service_names_is_mounted_in_it(name: str) -> None:
    service = SERVICES[name]
    texts = [*words(service["command"]), *service.get("environment", {}).values()]
    texts += service.get("healthcheck", {}).get("test", [])
    paths = {path for text in texts for path in re.findall(r"(?<![\w/.:])/\w[\w/.]*", interpolated(text, {}))}
    for path in paths:
        assert any(path.startswith(target) for target in mounts(service)), path
    owned = set(re.findall(r"/\w+(?:/\w+)?", " ".join(line for line in instructions("RUN") if "--mode 0700" in line)))
    assert set(mounts(service)) <= owned, "volumes take their owner from the image"


def test_the_trainers_memory_can_be_mapped_by_the_checkpoint_consumer() -> None:
    """Both see the same process numbers, which outlive them, and are the same user."""
    together = [name for name, service in SERVICES.items() if service.get("pid") == "service:pause"]
    assert together == ["broker", "trainer", "checkpoint"]
    assert len({SERVICES[name]["hostname"] for name in together}) == 1
    assert all("user" not in SERVICES[name] for name in together)


def test_prometheus_asks_the_exporter() -> None:
    config = yaml.safe_load((ROOT / "containers" / "prometheus.yml").read_text())
    targets = [target for job in config["scrape_configs"] for one in job["static_configs"] for target in one["targets"]]
    assert targets == ["prometheus-exporter:9464"]
    assert "prometheus.port=9464" in SERVICES["prometheus-exporter"]["command"]


def test_the_gpu_file_changes_what_there_is() -> None:
    changes = yaml.safe_load((ROOT / "containers" / "gpu.yml").read_text())["services"]
    assert set(changes) == {"trainer"}
    for argument in changes["trainer"]["build"]["args"]:
        assert re.search(rf"^ARG {argument}\b", DOCKERFILE, re.MULTILINE)
