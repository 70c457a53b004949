import json

import pytest

from pageferry.core.errors import InvalidArgumentError
from pageferry.router.gateway.strict_json import decode_json


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "line 1 column 1"),
        (b'{"prompt": "a",}', "line 1 column 16"),
        (b'{"temperature": NaN}', "NaN"),
        (b'{"temperature": -Infinity}', "-Infinity"),
        (b'{"temperature": 1e999}', "finite"),
        (b'{"prompt": "\xff"}', "is not UTF-8 at byte 12"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "digits"),
        (b"[1]", "is a list, must be a JSON object"),
        (b'{"prompt": "a", "prompt": "b"}', "prompt is given twice"),
        (b'{"\\udfff": 1, "\\udfff": 2}', "? is given twice"),
    ],
)
def test_malformed_json_is_told_with_its_place(body: bytes, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_json(body)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 200


def test_many_fields_before_one_that_comes_twice_take_no_longer_than_their_number_says() -> None:
    names = [f"a{number}" for number in range(200_000)]
    body = "{" + ",".join(f'"{name}":0' for name in [*names, names[-1]]) + "}"
    with pytest.raises(InvalidArgumentError, match="a199999 is given twice"):
        decode_json(body.encode())
    assert len(decode_json(json.dumps(dict.fromkeys(names, 0)).encode())) == 200_000
