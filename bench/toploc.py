"""Times TOPLOC proofs: build and verify of 4096 tokens, next to the published package if it can be imported.

    python -m bench.toploc
    python -m bench.toploc --reference /path/to/venv/bin/python      # a venv with toploc 0.1.6 and the torch it links

1. Gaussian activations [T, D] in bfloat16 from a fixed seed, one row of proofs per 32 tokens, k = 128.
2. Ours and the reference's are timed in turns, each in its own process, so that a busy machine is busy for both; the
   best and the median of the repetitions are printed, and the ratio of the bests.
3. The proofs are exchanged: each side verifies the other's, and the worst statistics are printed. Ties at the k-th
   magnitude may cost up to 5 of 128 exponents between implementations (facts of the wire format, not of either side).

Nothing is asserted here; tests/inference/proofs/test_toploc.py does that.
"""

import statistics
import sys
import time

import numpy as np

from inference.proofs import toploc
from sharding.system import cli
from tests.support import proofs as proofs_lib
from tests.support import toploc_reference


def activations(num_tokens: int, dim: int, seed: int = 0) -> np.ndarray:
    """Returns random activations [T, D] in bfloat16."""
    values = np.random.default_rng(seed).standard_normal((num_tokens, dim), np.float32)
    return values.astype(toploc.jnp.bfloat16)


def ours(hidden_TD: np.ndarray, repeat: int) -> dict:
    """Times our build and verify; returns the seconds and the proofs."""
    build, verify = [], []
    for _ in range(repeat + 1):  # the first one fills the table of inverses
        begun = time.perf_counter()
        proofs = proofs_lib.build(hidden_TD)
        build.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        results = proofs_lib.verify(hidden_TD, proofs)
        verify.append(time.perf_counter() - begun)
        assert all(result.accepted for result in results)
    return {"build": build[1:], "verify": verify[1:], "proofs": proofs}


def line(name: str, times: list[float]) -> str:
    """Formats the best and the median."""
    return f"  {name:<10} best {min(times) * 1e3:7.2f} ms   median {statistics.median(times) * 1e3:7.2f} ms"


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit code."""
    parser = cli.Parser(prog="python -m bench.toploc", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dims", type=int, nargs="+", default=[1024, 5120])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--rounds", type=int, default=3, help="number of turns of ours and the reference")
    parser.add_argument("--reference", help="Python of an environment with toploc 0.1.6; without it only ours is timed")
    args = parser.parse_args(argv)
    for dim in args.dims:
        hidden_TD = activations(args.tokens, dim)
        mine: dict[str, list] = {"build": [], "verify": []}
        theirs: dict[str, list] = {"build": [], "verify": []}
        for _ in range(args.rounds):
            run = ours(hidden_TD, args.repeat)
            for key in mine:
                mine[key] += run[key]
            if args.reference:
                other = toploc_reference.run(args.reference, hidden_TD, run["proofs"], args.repeat)
                for key in theirs:
                    theirs[key] += other[key]
        print(f"T = {args.tokens}, D = {dim}, k = 128, {len(run['proofs'])} proofs")
        for key in mine:
            print(line(key, mine[key]))
            if args.reference:
                print(line("reference", theirs[key]) + f"   ratio {min(mine[key]) / min(theirs[key]):.2f}")
        if args.reference:
            results = proofs_lib.verify(hidden_TD, [bytes.fromhex(proof) for proof in other["proofs"]])
            same = sum(a.hex() == b for a, b in zip(run["proofs"], other["proofs"], strict=True))
            print(f"  {same} of {len(results)} proofs are the same bytes")
            worst = max(results, key=lambda r: r.exp_mismatches)
            print(f"  theirs here: {sum(r.accepted for r in results)} accepted, worst {worst.exp_mismatches} exponents")
            print(f"  ours there: worst {max(view[0] for view in other['view'])} exponents")
    return 0


if __name__ == "__main__":
    sys.exit(main())
