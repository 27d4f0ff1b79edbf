"""A class of PyTorch's Python over a base of ours, in place of one in C++."""

import types


def rebased(theirs: type, base: type) -> type:
    """A copy of a class, in which `super()` finds another base.

    Args:
        theirs: PyTorch's class, with one base.
        base: ours, with what PyTorch's Python asks of that one.
    """
    cell = types.CellType()

    def copied(value):
        if isinstance(value, (staticmethod, classmethod)):
            return type(value)(copied(value.__func__))
        if isinstance(value, property):
            parts = (value.fget, value.fset, value.fdel)
            return property(*map(copied, parts), value.__doc__)
        if not isinstance(value, types.FunctionType) or not value.__closure__:
            return value
        names = value.__code__.co_freevars
        closure = tuple(
            cell if name == "__class__" else its
            for name, its in zip(names, value.__closure__, strict=True)
        )
        made = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, value.__defaults__,
            closure,
        )  # fmt: skip
        made.__kwdefaults__, made.__doc__ = value.__kwdefaults__, value.__doc__
        made.__dict__.update(value.__dict__)
        made.__qualname__, made.__annotations__ = (
            value.__qualname__,
            value.__annotations__,
        )
        return made

    own = {"__dict__", "__weakref__"}
    body = {name: copied(v) for name, v in vars(theirs).items() if name not in own}
    cell.cell_contents = found = type(theirs.__name__, (base,), body)
    return found
