from typing import NamedTuple
class Host(NamedTuple):
    launch: float = 40e-6
    call: float = 110e-6
    function: float = 70e-6
    back: float = 1.0
    micro: float = 0.0
    def seconds(self, cost):
        return (self.launch*(cost.launches+self.back*cost.back_launches)+self.call*cost.calls+self.function*cost.functions)
