import pytest

from roost.rollout.agents.react import cut_at_line, python_in

FENCE = "```"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        pytest.param("no code at all", "", id="none"),
        pytest.param(f"{FENCE}python\na\n{FENCE}", "a", id="one"),
        pytest.param(f"{FENCE}Python \na\n{FENCE}", "a", id="spelt otherwise"),
        pytest.param(
            f"{FENCE}python\na\n{FENCE}\ntext\n{FENCE}py\n  b\n{FENCE}", "a\n  b", id="all, indents as they are"
        ),
        pytest.param(f"{FENCE}python\na\n{FENCE}\n{FENCE}python\nb", "a\nb", id="the last one does not end"),
        pytest.param(f"{FENCE}\na\n{FENCE}", "a", id="no language"),
        pytest.param(f"{FENCE}\noutput\n{FENCE}\n{FENCE}python\na\n{FENCE}", "a", id="no language beside Python"),
        pytest.param(f"{FENCE}bash\nls\n{FENCE}", "", id="another language"),
        pytest.param(f"{FENCE}json\n{{}}\n{FENCE}\n{FENCE}python\na", "a", id="another language before"),
        pytest.param(f"{FENCE}python\n\n{FENCE}", "", id="an empty one"),
        pytest.param(f"inline {FENCE}python x{FENCE} text", "", id="in the middle of a line"),
        pytest.param(f"{FENCE}python\r\na\r\n{FENCE}\r\n", "a", id="lines of Windows"),
    ],
)
def test_python_is_found(text, code):
    assert python_in(text) == code


@pytest.mark.parametrize(
    ("text", "limit", "shown"),
    [
        pytest.param("one\ntwo", 7, "one\ntwo", id="fits"),
        pytest.param("one\ntwo", 6, "one\n[4 of 7 characters are not shown]", id="cut at a line"),
        pytest.param("one\ntwo\n", 7, "one\ntwo\n[1 of 8 characters are not shown]", id="to the end of a line"),
        pytest.param("abcdef", 4, "abcd\n[2 of 6 characters are not shown]", id="one long line"),
    ],
)
def test_output_is_cut_at_a_line(text, limit, shown):
    assert cut_at_line(text, limit) == shown
