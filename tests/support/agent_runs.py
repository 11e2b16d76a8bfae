"""A training for tests of agents: ``agent_runs.py NAME FACTOR``. Its loss is multiplied by the factor at each batch.

It hangs while a file ``hang`` is in its folder."""

import sys
import time

from offloop import Event, Publisher


def train(name: str, factor: float) -> None:
    loss = 1.0
    with Publisher(name, max_delay=0, capture_console=True) as publisher:
        publisher.publish(Event.FIT_START)
        for batch in range(1, 100_000):
            loss *= factor
            print(f"batch {batch}", "x" * 500, flush=True)
            publisher.publish(Event.BATCH_END, epoch=0, batch=batch, sample=batch, loss=min(loss, 1e30), lr=[0.1])
            if batch < 20:
                text = "\x1b[31m" + "red " * 600
                publisher.log_table("samples", [{"prompt": f"prompt {batch}", "text": text, "score": loss}])
            time.sleep(0.02)
            while (publisher.run_dir / "hang").exists():
                time.sleep(0.01)
            if publisher.stop_requested:
                publisher.close("stopped")
                return


if __name__ == "__main__":
    train(sys.argv[1], float(sys.argv[2]))
