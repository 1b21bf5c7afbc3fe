"""Runs a benchmark and its peer in PyTorch's FSDP2 in turns and prints both with their ratio.

The machine may be shared, so each configuration is measured in every round, ours and the peer's
one after the other, and the smallest figure of each counts. Writes BUILD/bench/summary.json.
"""
import json
import os
import pathlib
import subprocess
import sys

ROUNDS = 5
HERE = pathlib.Path(__file__).parent


def lines(command):
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def main():
    build = pathlib.Path(sys.argv[1])
    commands = {"ours": [str(build / "bench" / "host_overhead_bench"), "10"],
                "peer": [sys.executable, str(HERE / "peer" / "host_overhead.py"), "2"]}
    best = {}
    for round_ in range(ROUNDS):
        for who, command in commands.items():
            for line in lines(command):
                key = (line["groups"], line["world_size"], line["params_per_group"])
                entry = best.setdefault(key, {})
                for field in ("total", "floor"):
                    if field in line:
                        name = who if field == "total" else "floor"
                        entry[name] = min(entry.get(name, float("inf")), line[field])
        print(f"round {round_ + 1} of {ROUNDS}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print("host-overhead, us of CPU per group and step, best of", ROUNDS)
    print(f"{'groups':>7}{'world':>7}{'params':>8}{'ours':>9}{'FSDP2':>10}{'ratio':>8}{'floor':>8}")
    summary = []
    for (groups, world, params), entry in best.items():
        ratio = entry["peer"] / entry["ours"]
        print(f"{groups:7}{world:7}{params:8}{entry['ours']:9.1f}{entry['peer']:10.1f}"
              f"{ratio:8.1f}{entry['floor']:8.1f}")
        summary.append({"case": "host-overhead", "metric": f"groups={groups} world={world} "
                        f"params={params}", "unit": "us of CPU per group", "ours": entry["ours"],
                        "peer": entry["peer"], "ratio": round(ratio, 2), "floor": entry["floor"]})
    (build / "bench" / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


if __name__ == "__main__":
    main()
