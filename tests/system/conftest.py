"""A NATS server for all tests of a file that leave it running."""

from collections.abc import Iterator

import pytest
from nats_servers import NatsServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    made = NatsServer(tmp_path_factory.mktemp("nats"))
    yield made
    made.kill()
