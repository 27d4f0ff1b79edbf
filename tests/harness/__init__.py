"""How notebooks are run as tests: loaded by the conftest.py at the root, in every run.

notebooks.py  the pytest plugin: cells as tests, outputs compared, the end of a run
kernels.py    one kernel
processes.py  all processes of a kernel: what they see, how they are found and ended
budgets.py    what a notebook may take, and what it took
usage.py      memory and sockets of its processes, sampled
files.py      files that it wrote or left
last_lines.py what a run says in the end, and what is run once more
progress.py   a line about a long run every half minute
touched.py    which tests a change touches: --since COMMIT
order.py      what a run in several processes begins with

small_course.py has the notebooks on which all this is tested.
"""
