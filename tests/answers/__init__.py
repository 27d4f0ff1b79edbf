"""What learners answer to the exercises: `lesson_04.py` has the answers for lesson 04.

A file has two dictionaries, by the name of the check, behind the functions that they
need:

    RIGHT   answers that must be called right. The worked solution of an exercise is one
            already, so these differ from it in kind.
    WRONG   pairs of an answer that must be called wrong, and a part of the reason.

A tuple holds the answers that the check takes; anything else is the one that it takes.

These files are in no folder of the course's own code (see `exercises.exercise`), so an
error that an answer raises counts as the learner's, like one from a notebook's cell.
What an answer takes from its lesson's checks, it imports from `exercises.lesson_NN`.
"""


def as_answers(entry) -> tuple:
    """What an entry of `RIGHT` or `WRONG` gives to the check."""
    return entry if isinstance(entry, tuple) else (entry,)


def other(base: type, **members) -> type:
    """The class of an answer that does these things in another way than `base`."""
    return type("Other", (base,), members)
