"""Measures --launcher ray on a cluster of two nodes, beside --launcher processes.

    python benchmarks/launchers.py --repeat 3 -- --preset minatar

The nodes are those of ray.cluster_utils: they have a CPU for Ray each and processes of
their own, but share this machine. A round runs each variant with both launchers in
turn. The cluster runs only during the runs that use it. PolyBeast's servers reach the
learner by plain TCP there. SPS is measured as in throughput.py.
"""

import argparse
import contextlib
import statistics
from collections.abc import Iterator

from ray.cluster_utils import Cluster
from throughput import describe_machine, run_variant

VARIANTS = ("monobeast", "polybeast")


@contextlib.contextmanager
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two nodes with one actor each."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1, node_ip_address="127.0.0.2")
        yield cluster.address
    finally:
        cluster.shutdown()


def measure(variant: str, launcher: str, args: argparse.Namespace) -> float:
    """SPS of one run. Raises RuntimeError if it fails."""
    argv = [*args.flags, "--num_actors", "2", "--launcher", launcher]
    if launcher == "processes":
        return float(run_variant(variant, argv, args)["sps"])
    if variant == "polybeast":
        argv += ["--insecure"]
    with two_nodes() as address:
        argv += ["--ray_address", address]
        return float(run_variant(variant, argv, args)["sps"])


def main() -> None:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] [-- flags of the variants]",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--repeat", type=int, default=3, help="rounds")
    add("--seconds", type=float, default=30.0, help="seconds to measure per run")
    add("--warm_up", type=float, default=8.0, help="seconds after the first update")
    add("--window", type=float, default=2.0, help="seconds per window")
    add("flags", nargs="*", help="flags of the variants")
    args = parser.parse_args()
    print(", ".join(f"{k} {v}" for k, v in describe_machine().items() if v is not None))
    sps: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.repeat):
        for variant in VARIANTS:
            for launcher in ("processes", "ray"):
                found = measure(variant, launcher, args)
                sps.setdefault((variant, launcher), []).append(found)
                print(f"{variant} --launcher {launcher}: {found:,.0f} SPS", flush=True)
    for variant in VARIANTS:
        native, ray = (
            statistics.median(sps[variant, name]) for name in ("processes", "ray")
        )
        print(
            f"{variant}, medians of {args.repeat}: processes {native:,.0f}, ray "
            f"{ray:,.0f} SPS, ratio {ray / native:.2f}"
        )


if __name__ == "__main__":
    main()
