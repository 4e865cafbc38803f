"""Which unit holds a byte at the peak, on programs with known answers."""

from __future__ import annotations

from bigmodel.simulator import ProgramBuilder, Task, simulate
from bigmodel.simulator.program import Member
from bigmodel.simulator.unit_holdings import holdings_by_unit


def builder_of(*elements: int) -> ProgramBuilder:
    builder = ProgramBuilder()
    for index, count in enumerate(elements):
        builder.join(
            Member(
                name=f"unit {index}",
                elements=count,
                trainable_elements=count,
                buffer_bytes=0,
            )
        )
    return builder


def rows_of(builder: ProgramBuilder) -> dict[str, dict[str, int]]:
    program = builder.build()
    (timeline,) = simulate([program])
    rows = holdings_by_unit(program, timeline.peak)
    assert sum(n for _, held in rows for _, n in held) == timeline.peak.num_bytes
    return {name: dict(held) for name, held in rows}


def change(builder: ProgramBuilder, turn: str, count: int, surge: int = 0) -> None:
    builder.turn = turn
    risen = (("activations", count + surge),) if surge else ()
    builder.add(Task(label=turn, change=(("activations", count),), surge=risen))


def test_what_comes_belongs_to_the_unit_whose_turn_it_is():
    builder = builder_of(1, 1)
    change(builder, "unit 0", 70)
    change(builder, "unit 1", 50)
    assert rows_of(builder) == {
        "unit 0": {"activations": 70},
        "unit 1": {"activations": 50},
    }


def test_what_was_handed_on_goes_from_the_unit_that_made_it():
    builder = builder_of(1, 1, 1)
    for index in range(3):
        change(builder, f"unit {index}", 50)
    # Its own 50, and 10 that unit 1 had handed to it; a rise of 200 is the peak.
    change(builder, "unit 2", -60)
    change(builder, "unit 1", 0, surge=200)
    assert rows_of(builder) == {
        "unit 0": {"activations": 50},
        "unit 1": {"activations": 40 + 200},
    }


def test_a_task_for_another_unit_says_so():
    builder = builder_of(1, 1)
    builder.turn = "unit 0"
    builder.allocate("gathered weights", 30, "fetch ahead", unit="unit 1")
    builder.allocate("gathered weights", 20, "fetch")
    assert rows_of(builder) == {
        "unit 0": {"gathered weights": 20},
        "unit 1": {"gathered weights": 30},
    }


def test_the_base_is_shared_out_by_parameters_and_no_byte_is_lost():
    builder = builder_of(1, 1, 2)
    builder.hold("weights", 18)
    builder.hold("batch", 5)
    assert rows_of(builder) == {
        "unit 0": {"weights": 4},
        "unit 1": {"weights": 4},
        "unit 2": {"weights": 10},
        "": {"batch": 5},
    }


def test_what_goes_before_it_comes_is_not_counted_twice():
    builder = builder_of(1)
    builder.hold("weights", 8)
    change(builder, "unit 0", -5)
    change(builder, "unit 0", 25)
    assert rows_of(builder) == {"unit 0": {"activations": 20, "weights": 8}}
