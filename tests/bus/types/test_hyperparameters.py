"""In which order hyperparameters are shown."""

from offloop.bus.types.hyperparameters import chosen_first


def test_what_a_person_chose_comes_before_what_the_optimizer_has_anyway() -> None:
    names = ["model/name", "optimizer/eps", "seed", "config/task", "precision", "config/lr"]
    assert chosen_first(names) == ["config/task", "config/lr", "seed", "precision", "model/name", "optimizer/eps"]
