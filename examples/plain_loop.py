"""Your own training loop, published to consumers.

    python examples/plain_loop.py                       in one terminal
    consumer --callbacks speed,lr,metrics               in another, before it or while it runs; --last: after it

Needs only offloop: the "model" is a line.
"""

import random
import sys
import time

from offloop import Event, Publisher

batches = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
random.seed(0)
slope, lr, batch_size = 0.0, 0.05, 32

with Publisher() as publisher:
    publisher.publish(Event.FIT_START, max_duration=f"{batches}ba")
    for batch in range(1, batches + 1):
        points = [random.uniform(-1, 1) for _ in range(batch_size)]
        errors = [(slope - 3) * x for x in points]
        loss = sum(error**2 for error in errors) / batch_size
        slope -= lr * sum(2 * error * x for error, x in zip(errors, points, strict=True)) / batch_size
        publisher.publish(
            Event.BATCH_END,
            epoch=0,
            batch=batch,
            sample=batch * batch_size,
            loss=loss,
            lr=[lr],
            max_duration=f"{batches}ba",
        )
        time.sleep(0.002)
    publisher.publish(Event.FIT_END, batch=batches, sample=batches * batch_size)

print(f"slope {slope:.3f}; recorded in {publisher.recording}")
