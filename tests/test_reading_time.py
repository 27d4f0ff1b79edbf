"""Tests of the rule that gives a lesson's minutes."""

import nbformat.v4 as v4

from tests import reading_time

TEXT = "# A title\n\nTwo [words here](https://example.org/a_long_target).\n"
FENCED = "```bash\npython train.py\n```\n"


def lesson(*cells):
    return v4.new_notebook(cells=list(cells))


def printed(text, **metadata):
    stream = v4.new_output("stream", name="stdout", text=text)
    return v4.new_code_cell("a = 1\n\nprint(a)", outputs=[stream], metadata=metadata)


def test_words_count_without_the_targets_of_links():
    assert reading_time.of(lesson(v4.new_markdown_cell(TEXT))).words == 5


def test_a_block_of_code_in_the_text_counts_as_lines_of_code():
    found = reading_time.of(lesson(v4.new_markdown_cell(TEXT + FENCED)))
    assert (found.words, found.code_lines) == (5, 1)


def test_hidden_code_does_not_count_but_its_output_does():
    hidden = printed("1\n2\n", jupyter={"source_hidden": True})
    found = reading_time.of(lesson(hidden, printed("1\n")))
    assert (found.code_lines, found.output_lines) == (2, 3)


def test_of_a_long_output_15_lines_are_read():
    assert reading_time.of(lesson(printed("1\n" * 40))).output_lines == 15


def test_a_picture_is_no_line_of_output():
    data = {"image/svg+xml": "<svg/>", "text/plain": "<Picture>"}
    shown = v4.new_output("display_data", data=data)
    found = reading_time.of(lesson(v4.new_code_cell("draw()", outputs=[shown])))
    assert (found.pictures, found.output_lines) == (1, 0)


def test_exercises_and_the_set_up_do_not_count():
    cells = (
        printed("1\n", tags=["colab-setup"]),
        v4.new_markdown_cell("## Exercises\n\nWrite a loop."),
        printed("not yet\n", tags=["exercise"]),
        v4.new_markdown_cell("## In practice\n\nNow."),
    )
    assert reading_time.of(lesson(*cells)) == reading_time.ReadingTime(3, 0, 0, 0)


def test_minutes_are_stated_to_the_nearest_five():
    time = reading_time.ReadingTime(1800, 120, 60, 2)
    assert (time.minutes, time.stated) == (18 + 16 + 3 + 1.5, 40)
