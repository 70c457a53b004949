"""The profiles file."""

from fuzzing import held_to_contract, mutated, numbers
from hypothesis import given, strategies as st

from pageferry.core.profiles import parse_profiles

WRITTEN = """
default = "vip"
[profiles.vip]
priority = -10
page_formats = ["bf16", "k=fp16,v=bf16"]
ttft_slo_ms = 500
[[profiles.vip.switch]]
use = "quality"
hours = "22:00-06:00"
timezone = "+05:30"
[profiles.night]
base = "throughput"
batch_window_ms = 20.5
"""
FIELDS = ["priority", "min_priority", "max_running", "batch_window_ms", "page_formats", "speculation", "base", "switch"]
RULES = ["use", "queued_above", "queued_below", "busy_above", "busy_below", "hours", "timezone", "for_s"]
ODD = ['""', '"a b"', '["int8"]', "[1]", "true", "0x" + "f" * 5000, "nan", "inf", "1979-05-27", "{}", "[[]]", "[{}]"]
TEXTS = ['"vip"', '"00:00-24:00"', '"23:00-01:00"', '"UTC"', '"+99:99"', '"../x"', '"localtime"', '"a\\u0000b"', "0.5"]
VALUES = st.sampled_from(ODD + TEXTS) | numbers(-(2**65), 2**65).map(str)
LINES = st.builds("{} = {}".format, st.sampled_from(FIELDS + RULES), VALUES)
TABLES = st.sampled_from(["[profiles.b]", "[profiles]", "[[profiles.a.switch]]", "[profiles.a.switch]", "[[profiles]]"])
FILES = st.lists(LINES | TABLES, max_size=8).map(lambda lines: "\n".join(["[profiles.a]", *lines]).encode())


@given(mutated(st.just(WRITTEN.encode())) | FILES | st.binary(max_size=100))
def test_a_file(data: bytes) -> None:
    with held_to_contract(UnicodeDecodeError):
        parse_profiles(data.decode(), "profiles.toml")
