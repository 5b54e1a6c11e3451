"""Laws of the strict YAML reader."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortprep.spec.yaml_text import MAX_BYTES, MAX_DEPTH, MAX_VALUES, parse_yaml


def parse(text):
    return parse_yaml(text if isinstance(text, bytes) else text.encode(), file="x.yaml")


def only_problem(text):
    problems = parse(text).problems
    assert len(problems) == 1, problems
    return str(problems[0])


SCALARS = {
    "1": 1, "-7": -7, "0x1F": 31, "0o17": 15, "1e-3": 1e-3, ".5": 0.5, "0123": 123, "1_000": "1_000",
    "true": True, "False": False, "null": None, "": None, "on": "on", "1:30": "1:30",
    "2026-01-01": "2026-01-01", "'1'": "1", '"true"': "true",
}  # fmt: skip


@pytest.mark.parametrize(("scalar", "value"), SCALARS.items())
def test_scalars_are_read_as_yaml_1_2_reads_them(scalar, value):
    data = parse(f"a: {scalar}\n").data
    assert data == {"a": value}
    assert type(data["a"]) is type(value)


def test_block_scalars_are_text():
    assert parse("a: |\n  12\nb: >-\n  true\n").data == {"a": "12\n", "b": "true"}


def test_every_value_has_the_line_of_its_key():
    document = parse("a: 1\nb:\n  c: 2\n  d:\n    - x\n    - y\n")
    lines = {("a",): 1, ("b",): 2, ("b", "c"): 3, ("b", "d"): 4, ("b", "d", 0): 5, ("b", "d", 1): 6}
    assert document.lines == lines | {(): 1}


def test_a_place_without_a_line_gets_that_of_what_is_around_it():
    assert parse("a: 1\nb:\n  c: 2\n").line_of(("b", "missing", 3)) == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"a: 1\nb: \xff\n", "x.yaml:2: expected UTF-8 text, got byte 0xff"),
        ("a: 1\n".encode("utf-16"), "x.yaml:1: expected UTF-8 text, got byte 0xff"),
        (b"a: 1\n\tb: 2\n", "x.yaml:2: not readable as YAML: found a tab character"),
        (b"a:\n  - 1\n-\t\tb: [\n", "x.yaml:3: "),
        (b"a: [1\nb: 2\n", "x.yaml:2: not readable as YAML: "),
        (b"a: *nowhere\n", "x.yaml:1: aliases are not supported"),
        (b"a: 1\n---\nb: 2\n", "x.yaml:3: expected one document, got another"),
        (b"\njust text\n", "x.yaml:2: expected a mapping (key: value) at the top level"),
        ("é: 1\na: \x07\n".encode(), "x.yaml: not readable as YAML: unacceptable character #x0007"),
        (b"a: 1\nb: 2\na: 3\n", "x.yaml:3: duplicate key 'a'; it is already in line 1"),
        (b"b: {c: 1, 'c': 2}\n", "x.yaml:1: duplicate key 'c'; it is already in line 1"),
        (b"a:\n  1: x\n", 'x.yaml:2: expected a string as key, got 1; write it in quotes: "1"'),
        (b"? [a]\n: x\n", "x.yaml:1: expected a string as key, got a list or mapping"),
        (b"a: !!str 5\n", "x.yaml:1: tags are not supported, got !!str; remove it"),
        (b"a: !!python/name:os.system x\n", "x.yaml:1: tags are not supported, got !!python/name:os"),
        (b"a: .inf\n", "x.yaml:1: expected a finite number, got .inf"),
        (b"a: -.INF\n", "x.yaml:1: expected a finite number, got -.INF"),
        (b"a: .nan\n", "x.yaml:1: expected a finite number, got .nan"),
        (b"a: 1e999\n", "x.yaml:1: expected a finite number, got 1e999"),
        (b"a: " + b"9" * 5000, "x.yaml:1: expected a finite number, got 999"),
        (b"a: " + b"x" * MAX_BYTES, f"x.yaml: file too large; expected at most {MAX_BYTES} bytes"),
    ],
    ids=range(21),
)
def test_what_could_surprise_is_refused_with_its_line(text, told):
    assert only_problem(text).startswith(told)


@pytest.mark.attack
@pytest.mark.parametrize(
    "text",
    [
        "l0: &l0 [x, x]\n"
        + "".join(f"l{n + 1}: &l{n + 1} [{', '.join([f'*l{n}'] * 10)}]\n" for n in range(9)),
        f"a: &a {'x' * 100_000}\nb: [{', '.join(['*a'] * 1000)}]\n",
        "a: &a [*a, *a]\n",
    ],
    ids=["bomb", "long text", "itself"],
)
def test_aliases_are_refused_and_never_expanded(text):
    assert "aliases are not supported" in only_problem(text)
    assert parse(text).data == {}


@pytest.mark.attack
@pytest.mark.parametrize(
    ("before", "line"),
    [
        ("", 1),
        ("\ufeff\ufeff", 1),
        ("# a\n", 2),
        ("# a\r", 2),
        ("# a\x85", 2),
        ("# a\u2028", 2),
        ("a: 1\n...\n", 3),
    ],
)
def test_directives_are_refused_before_they_are_compared_with_each_other(before, line):
    """60,000 of them, which are 1 MB, took 9 seconds."""
    text = before + "".join(f"%TAG !{number:x}! a\n" for number in range(20_000)) + "---\na: 1\n"
    assert only_problem(text).startswith(f"x.yaml:{line}: directives are not supported")


@pytest.mark.attack
@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "[{a: "])
def test_deep_nesting_is_refused(opening):
    assert only_problem(opening * 20_000)
    assert f"nested deeper than {MAX_DEPTH} levels" in only_problem(f"a: {'[' * 50}{']' * 50}")


def test_an_empty_file_is_an_empty_mapping():
    assert parse("# nothing\n").data == {}
    assert parse("").data == {}


def test_a_byte_order_mark_is_no_part_of_the_first_key():
    assert parse(b"\xef\xbb\xbfa: 1\n").data == {"a": 1}


# YAML knows no surrogate pairs, which is how JSON escapes what lies beyond U+FFFF.
_CHARACTERS = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"], exclude_characters="\0")
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(_CHARACTERS, max_size=20),
)
_KEYS = st.text(_CHARACTERS, max_size=10)
_JSON = st.recursive(_SCALARS, lambda x: st.lists(x, max_size=4) | st.dictionaries(_KEYS, x, max_size=4))


def test_json_is_read_as_json_reads_it():
    @given(st.dictionaries(_KEYS, _JSON, max_size=4))
    def law(data):
        document = parse(json.dumps(data))
        assert document.data == data
        assert document.problems == ()

    law()


def test_any_bytes_are_read_or_their_problem_is_told():
    @given(
        st.one_of(st.binary(max_size=60), st.text(alphabet="ab:-[]{}&*!?|>'\"#%@ \n\t,1.~\\x0", max_size=60))
    )
    def law(text):
        document = parse(text if isinstance(text, bytes) else text.encode())
        assert not (document.problems and document.data)
        json.dumps(document.data, allow_nan=False).encode()

    law()


@pytest.mark.attack
def test_a_file_of_many_values_is_refused_before_they_are_checked():
    assert f"more than {MAX_VALUES} values" in only_problem(f"a: [{'[],' * (MAX_VALUES + 1)}]")
    keys = "\n".join(f"k{number}:" for number in range(MAX_VALUES + 1))
    assert f"more than {MAX_VALUES} values" in only_problem(keys)
