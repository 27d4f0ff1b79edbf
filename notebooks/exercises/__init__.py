"""The exercises, one file for each lesson: `lesson_04.py` has those of lesson 04.

A lesson's file has, from top to bottom, for each of its exercises

    @exercise("04.1", hints=("where to begin", "the step that most people miss"))
    def peak_of_step(answer) -> None:
        "What is asked. Raises `Wrong` with a reason, `NotYet`, or returns: right."

    @solution("04.1")
    def solution_1():
        "Why this is the answer, as prose that a learner reads before the code."
        weights, hidden = 8, 16
        return 2 * weights + 2 * hidden

and behind them the functions that the checks need. What a check must call right and
what it must call wrong, and why, is test material: lesson 04's is in
`tests/answers/lesson_04.py`. The tests give every one of those answers to its check,
run every solution, and ask for two hints and a solution in each exercise.

Hints. The first says where to look and asks a question; the second names the step that
is usually missed, and leaves the last one to the learner. Neither gives the answer.

Solutions. `check.solution("04.1")` shows the docstring and, below it, the body as a
cell that can be run: `return a, b` is shown as `check.peak_of_step(a, b)`. What
the learner writes is a function or a class inside the body, under the name that the
notebook gives it. The body may use what the notebook's own cells import, and nothing
else from this file; a test runs the text that is shown, in a namespace that has those
imports and no more. What else the notebook has made by then is a parameter, with a
function that makes one for the test:

    @solution("09.3", results=lambda: {"float32": trained()})
    def solution_3(results):

Whatever the learner has written is called by `call`, or in ranks by `in_ranks`: what it
raises is the learner's. An error in which no line of the learner's had a part is the
check's own, and is never called wrong. Shared by the lessons:

    exercise.py    what an exercise is, and how the learner's code is called
    counted.py     numbers that were counted, and lists of words
    ring.py        bytes that go round a ring
    results.py     what a function returns
    learning.py    gradients and weights that must equal those of one process
    streams.py     races, waits of the host, and overlap of a GPU's streams
    in_ranks.py    code that runs in ranks of its own

This package is found because the folder `notebooks` is on `sys.path`: a lesson runs in
it, and `helpers.check` puts it there for whatever runs elsewhere.
"""
