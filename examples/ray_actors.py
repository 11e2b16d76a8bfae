"""Rollout workers of Ray as actors of a run.

    pip install ray
    python examples/ray_actors.py

Ray's local workers inherit the environment of the program that starts Ray, so it starts within the run. On other
machines actors need a broker there: see the page on several hosts.
"""

import random
import time

import ray

import offloop


@ray.remote(num_cpus=0)
class Rollout:
    def __init__(self):
        self.actor = offloop.join(role="rollout")

    def generate(self, version):
        with self.actor.span("generate", version=version):
            time.sleep(0.02)
        rewards = [random.random() for _ in range(4)]
        self.actor.log_table("completions", [{"completion": "...", "reward": reward} for reward in rewards])
        self.actor.log(reward=sum(rewards) / len(rewards))
        return rewards

    def leave(self):
        self.actor.close()


with offloop.Publisher("ray") as training:
    ray.init(include_dashboard=False)
    workers = [Rollout.remote() for _ in range(2)]
    for batch in range(1, 51):
        made = ray.get([worker.generate.remote(batch - 1) for worker in workers])
        rewards = [reward for of_worker in made for reward in of_worker]
        training.publish("batch_end", batch=batch, loss=1 - sum(rewards) / len(rewards))
    ray.get([worker.leave.remote() for worker in workers])
    ray.shutdown()
