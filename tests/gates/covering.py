"""Which kernels the tests compile, of all that the gate compiles."""

from collections.abc import Iterable

from tnp.gates.compile import Job
from tnp.gates.compile_cuda import CudaJob


def covering(jobs: Iterable[Job | CudaJob]) -> list[Job | CudaJob]:
    """A few jobs of each kernel, which together have every dtype, every value of every constant,
    and every target of each operator that it is compiled for. The gate compiles all combinations.
    """
    of_kernel: dict[str, list] = {}
    for job in jobs:
        name, values = _values(job)
        of_kernel.setdefault(name, []).append((job, values))
    kept = []
    for candidates in of_kernel.values():
        missing = set().union(*(values for _, values in candidates))
        found = []
        while missing:
            found.append(max(candidates, key=lambda one: len(one[1] & missing)))
            missing -= found[-1][1]
        for one in list(found):  # what came first may be covered by what came later
            others = [other for other in found if other is not one]
            if one[1] <= set().union(*(values for _, values in others)):
                found = others
        kept += [job for job, _ in found]
    return kept


def _values(job: Job | CudaJob) -> tuple[str, set[tuple[str, str]]]:
    """The kernel's name, and what it is compiled with."""
    if isinstance(job, CudaJob):
        name, target, constants = job.source.name, job.architecture, dict(job.source.constants)
    else:
        name, target, constants = job.name, job.target.arch, job.launch_config
    given = constants | {"dtype": job.dtype}
    given |= {f"target of {operator}": target for operator, _ in job.users}
    return name, {(key, str(value)) for key, value in given.items()}
