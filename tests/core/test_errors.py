"""What errors say: enough to act on, and never more than can be told."""

from pageferry.core.errors import MAX_MESSAGE_CHARACTERS, InternalError, invalid


def test_a_value_is_shown_as_it_is() -> None:
    assert invalid("top_p", 0.0, "must be above 0").message == "top_p is 0.0, must be above 0"
    assert invalid("stop", ["a", 1], "must be a text").message == "stop is ['a', 1], must be a text"


def test_a_long_value_is_shown_in_part() -> None:
    for value in ("x" * 10**6, ["x" * 10**4] * 10**4, {str(i): i for i in range(10**4)}, 10**5000, b"x" * 10**6):
        message = invalid("name", value, "must be short").message
        assert message.startswith("name is ")
        assert message.endswith(", must be short")
        assert len(message) < MAX_MESSAGE_CHARACTERS


def test_a_long_message_is_cut() -> None:
    error = InternalError("a" * 10**6)
    assert len(error.message) == len(str(error)) == MAX_MESSAGE_CHARACTERS
