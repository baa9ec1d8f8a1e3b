"""Interleaving and its statistics, with a clock of our own: no test waits for the real one."""

import numpy as np
import pytest

from experiments.benchmarks import timing


class Machine:
    """A clock that moves only when a side runs, by that side's seconds, and remembers who ran."""

    def __init__(self, **seconds: float):
        self.now, self.ran = 0.0, []
        self.sides = {name: lambda name=name, cost=cost: self.run(name, cost) for name, cost in seconds.items()}

    def run(self, name: str, cost: float) -> None:
        self.now += cost
        self.ran.append(name)

    def clock(self) -> float:
        return self.now


def test_sides_run_in_turn_in_another_order_each_round():
    machine = Machine(a=1.0, b=2.0, c=4.0)
    readings = timing.interleave(machine.sides, rounds=7, clock=machine.clock)
    assert readings == {"a": [1.0] * 7, "b": [2.0] * 7, "c": [4.0] * 7}
    warm_up, rounds = machine.ran[:3], [machine.ran[i : i + 3] for i in range(3, 3 + 3 * 7, 3)]
    assert warm_up == ["a", "b", "c"]
    assert len(machine.ran) == 3 + 3 * 7
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({names[0] for names in rounds}) == 3


def test_short_calls_are_repeated_and_divided():
    machine = Machine(short=timing.LEAST_SECONDS / 10, tiny=1e-9, long=1.0)
    readings = timing.interleave(machine.sides, rounds=7, clock=machine.clock)
    assert readings["short"] == pytest.approx([timing.LEAST_SECONDS / 10] * 7)
    assert readings["tiny"] == pytest.approx([1e-9] * 7, rel=1e-4)
    calls = {name: (machine.ran.count(name) - 1) / 7 for name in machine.sides}
    assert calls == {"short": 10, "tiny": timing.MOST_CALLS, "long": 1}


def test_a_median_needs_seven_rounds():
    with pytest.raises(ValueError, match="rounds must be at least 7, got 6"):
        timing.interleave({"a": lambda: None}, rounds=6)


def test_a_ratio_is_of_medians_and_its_interval_comes_from_rounds():
    rng = np.random.default_rng(0)
    noise = rng.lognormal(sigma=0.1, size=(2, 400))
    found = timing.ratio(3 * noise[0], noise[1])
    assert found.value == 3 * np.median(noise[0]) / np.median(noise[1])
    assert found.low < 3 < found.high
    assert 0.02 < found.high - found.low < 0.2
    assert found.count == 400


def test_what_slows_a_whole_round_leaves_the_ratio_alone():
    mood = np.random.default_rng(1).lognormal(sigma=1.0, size=7)
    found = timing.ratio(2 * mood, mood)
    assert (found.value, found.low, found.high) == pytest.approx((2, 2, 2))


def test_one_outlier_does_not_move_a_median():
    seconds = [1.0] * 6 + [100.0]
    assert timing.ratio(seconds, [1.0] * 7).value == 1


def test_an_interval_is_the_same_every_time():
    seconds = np.random.default_rng(2).lognormal(size=(7, 2))
    assert timing.ratio(*seconds.T) == timing.ratio(*seconds.T)


def test_the_exponent_of_a_power_law_is_found():
    sizes = np.array([64, 128, 512])
    mood = np.random.default_rng(3).lognormal(sigma=0.5, size=(16, 1))
    found = timing.exponent(sizes, mood * 1e-9 * sizes**1.5)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
    noisy = timing.exponent(sizes, 1e-9 * sizes**2 * np.random.default_rng(4).lognormal(sigma=0.1, size=(64, 3)))
    assert noisy.low < 2 < noisy.high
    assert noisy.high - noisy.low < 0.1


def test_a_statistic_may_be_infinite():
    found = timing.of_medians([[1.0], [2.0], [3.0]], lambda medians: np.where(medians[..., 0] > 2, np.inf, 1.0))
    assert (found.value, found.low, found.high) == (1, 1, np.inf)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: timing.ratio([1.0, 2.0], [1.0]), r"same rounds, got shapes \(2,\) and \(1,\)"),
        (lambda: timing.of_medians([1.0], np.sum), r"seconds must be \[rounds, sides\], got shape \(1,\)"),
        (lambda: timing.exponent([1.0], [[1.0]]), r"seconds must be \[rounds, 1\] of at least two sizes"),
        (lambda: timing.exponent([1.0, 2.0], [[1.0]]), r"seconds must be \[rounds, 2\].*got \(1, 1\)"),
    ],
)
def test_readings_of_another_shape_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
