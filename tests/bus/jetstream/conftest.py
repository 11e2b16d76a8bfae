import pytest
from bridges import Copying, hurry


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    hurry(monkeypatch)


@pytest.fixture
def copying(request):
    """Start bridges, by default to ``nats_server``."""
    made = []

    def start(path, servers=None, **options):
        servers = servers or request.getfixturevalue("nats_server").servers
        made.append(Copying(path, servers, **options))
        return made[-1]

    yield start
    for one in made:
        one.stop()
