"""``/regen`` on the default model: at temperature 0 the same answer again, of any turn."""

import pytest

STORY = (
    "The lighthouse keeper counted {} ships on day {}, wrote their names into the blue book and "
    "lit the lamp when the wind came from the north. "
)


# Quest and lfps keep the rows of full: tests/sequence/test_same_call.py has all methods.
@pytest.mark.parametrize(
    "name",
    [
        *("full", "freekv", "h2o"),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("lfps", "quest")),
    ],
)
def test_the_same_answer_again(name, invoke, default_model):
    story = "".join(STORY.format(7 * day % 11, day) for day in range(1, 6))
    lines = [
        f"{story}How did the story go on?",
        "/regen",
        "Write a poem about a cat that sleeps.",
        "/regen",
        "/regen",
    ]
    result = invoke(
        "chat", "-m", str(default_model), "--device", "cpu", "--method", name, "--sparse-from", "0",
        "--temp", "0", "-n", "10", "-r", "\n", "--ignore-eos",
        stdin="".join(f"{line}\n" for line in lines).encode(),
    )  # fmt: skip
    assert result.code == 0, result.err
    first, again, second, *others = result.out.split("\n")[:5]
    assert first == again and others == [second, second]
    assert len(first) > 20 and len(second) > 20 and first != second
