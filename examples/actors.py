"""Reinforcement learning in five processes: a trainer, three rollout workers and an evaluator join one run.

    python examples/actors.py                           trains a minute; a number of batches can be given
    offloop ui                                          reward, staleness and completions, while it runs
    offloop export RUN --to trace                       what each process did, for Perfetto

A policy learns to add two digits from rewards alone. Workers sample completions with the newest policy that they have
seen, so a sample may be some versions old when it is trained on: its staleness.
"""

import multiprocessing
import os
import queue
import sys
import tempfile
import time

import torch

import offloop

DIGITS = 4
SUMS = 2 * DIGITS - 1
PROMPTS = [(left, right) for left in range(DIGITS) for right in range(DIGITS)]
BATCH = 64
WORKERS = 3


def make_policy():
    return torch.nn.Linear(len(PROMPTS), SUMS)


def load(path):
    """Return the newest policy and its version."""
    saved = torch.load(path)
    policy = make_policy()
    policy.load_state_dict(saved["policy"])
    return policy, saved["version"]


def save(path, policy, version):
    torch.save({"policy": policy.state_dict(), "version": version}, f"{path}.new")
    os.replace(f"{path}.new", path)


def roll_out(path, samples, seed):
    """Sample completions, judge them, and send them to the trainer."""
    torch.set_num_threads(1)
    with offloop.join(role="rollout") as actor:
        torch.manual_seed(seed)
        while not actor.training_ended:
            policy, version = load(path)
            with actor.span("generate", version=version), torch.no_grad():
                prompts = torch.randint(len(PROMPTS), (BATCH // 4,))
                chosen = torch.distributions.Categorical(logits=policy.weight.T[prompts] + policy.bias).sample()
            with actor.span("judge"):
                right = torch.tensor([sum(PROMPTS[prompt]) for prompt in prompts])
                rewards = (chosen == right).float()
            rows = [
                {
                    "prompt": f"{PROMPTS[prompt][0]} + {PROMPTS[prompt][1]} =",
                    "completion": str(int(answer)),
                    "reward": r,
                }
                for prompt, answer, r in zip(prompts.tolist(), chosen, rewards.tolist(), strict=True)
            ]
            actor.log_table("completions", [{**row, "version": version} for row in rows])
            actor.log(reward=rewards.mean())
            while not actor.training_ended:
                try:
                    samples.put((version, prompts.tolist(), chosen.tolist(), rewards.tolist()), timeout=0.1)
                    break
                except queue.Full:
                    continue
    samples.cancel_join_thread()


def evaluate(path):
    """Measure the newest policy, again and again."""
    torch.set_num_threads(1)
    with offloop.join(role="evaluator") as actor:
        while not actor.training_ended:
            policy, version = load(path)
            answers = (policy.weight.T + policy.bias).argmax(1).tolist()
            right = sum(answer == sum(prompt) for answer, prompt in zip(answers, PROMPTS, strict=True))
            actor.log(accuracy=right / len(PROMPTS), step=version)
            actor.event("evaluated", version=version)
            time.sleep(0.2)


def batches_of(samples, count):
    for _ in range(count):
        yield [samples.get() for _ in range(4)]


def train(count):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    policy = make_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    context = multiprocessing.get_context("spawn")
    samples = context.Queue(maxsize=8)
    path = os.path.join(tempfile.mkdtemp(), "policy.pt")
    save(path, policy, 0)
    run = offloop.watch(policy, optimizer, max_duration=f"{count}ba", run_name="sums")
    actors = []
    for _ in run.epochs(1):
        # Here the run has begun: its children find it in their environment.
        actors = [context.Process(target=roll_out, args=(path, samples, seed)) for seed in range(WORKERS)]
        actors.append(context.Process(target=evaluate, args=(path,)))
        for actor in actors:
            actor.start()
        for version, batch in enumerate(run.batches(batches_of(samples, count)), 1):
            versions, prompts, chosen, rewards = (list(part) for part in zip(*batch, strict=True))
            prompt, answer, reward = (torch.tensor(part).flatten() for part in (prompts, chosen, rewards))
            logits = policy(torch.nn.functional.one_hot(prompt, len(PROMPTS)).float())
            likelihood = torch.distributions.Categorical(logits=logits).log_prob(answer)
            loss = -(likelihood * (reward - reward.mean())).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            staleness = sum(version - 1 - old for old in versions) / len(versions)
            run.log(loss=loss, reward=reward.mean(), staleness=staleness)
            save(path, policy, version)
    for actor in actors:
        actor.join()
    print(f"run {run.run_name}: reward {reward.mean():.2f}")


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
