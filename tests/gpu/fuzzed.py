"""Problems whose calls are repeated in random order."""

from __future__ import annotations

from ficco.problem import Output, Problem, chunk_sizes


def cases(world: int) -> list[Problem]:
    """One odd problem an operator, small enough that host and device race each other."""
    even, k = chunk_sizes(131, world), 72
    output = (Output((56,) * world),)
    depths = chunk_sizes(k, world)
    splits = tuple(tuple(5 + (3 * s + 7 * r) % 11 for r in range(world)) for s in range(world))
    rows = tuple(sum(row) for row in splits)
    return [
        Problem("all_gather_matmul", world, even, k, output, "bfloat16"),
        Problem("matmul_reduce_scatter", world, even, k, output, "bfloat16", depths=depths),
        Problem("matmul_all_reduce", world, even, k, output, "float16", depths=depths),
        Problem("all_to_all_matmul", world, rows, k, output, "bfloat16", splits=splits),
        Problem("matmul_all_to_all", world, rows, k, output, "float32", splits=splits),
        Problem(
            "embedding_all_to_all", world, even, 1, output, "bfloat16",
            tables=((40,),) * world, lookups=((300,),) * world,
        ),
    ]  # fmt: skip


def shared_tiles(world: int) -> list[Problem]:
    """Such whose launches share their last tiles among programs, on 132 multiprocessors."""
    rows, depths, output = chunk_sizes(4090, world), (4104,) * world, (Output((1272,) * world),)
    return [
        Problem("all_gather_matmul", world, rows, 4104, output, "bfloat16"),
        Problem(
            "matmul_reduce_scatter", world, rows, sum(depths), output, "bfloat16", depths=depths
        ),
    ]
