"""The error of everything that the simulator does not have."""


class NotSimulated(NotImplementedError):
    """The simulator does not have this call, and will not guess."""

    def __init__(self, call: str, advice: str = ""):
        super().__init__(
            f"{call} is not simulated. {advice or 'It needs a real GPU.'} (simgpu)"
        )
