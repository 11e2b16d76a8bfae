"""Hooks of fields that are gone are never taken from torch while it goes through its hooks."""

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from offloop.trainer.fields.field import hook_optimizers


class Probe:
    def after_step(self, *_: Any) -> None:
        """Does nothing."""


def test_a_probe_that_is_collected_within_a_step_does_not_end_the_step() -> None:
    probes = [Probe() for _ in range(3)]
    dropping = register_optimizer_step_post_hook(lambda *_: probes.clear())
    for probe in probes:
        hook_optimizers(register_optimizer_step_post_hook, probe.after_step)
    del probe
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    optimizer.step()
    dropping.remove()
    assert not probes
