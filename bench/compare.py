"""Runs a benchmark and its peer in PyTorch's FSDP2 in turns and prints both with their ratio.

    compare.py BUILD [--case host-overhead|threads128] [--repetitions 5]

Ours and the peer's run one after the other in every repetition, since the machine may be shared.
Replaces the case's entries in BUILD/bench/summary.json. A claim needs five repetitions or more.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent


def lines(command):
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit(f"compare: {' '.join(command)} ended with {run.returncode}")
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def progress(repetition, repetitions):
    print(f"repetition {repetition + 1} of {repetitions}, load {os.getloadavg()[0]:.1f}",
          file=sys.stderr)


def host_overhead(build, repetitions):
    """Host time of a group and step; the smallest figure counts, since other work only adds."""
    commands = {"ours": [str(build / "bench" / "host_overhead_bench"), "10"],
                "peer": [sys.executable, str(HERE / "peer" / "host_overhead.py"), "2"]}
    best = {}
    for repetition in range(repetitions):
        for who, command in commands.items():
            for line in lines(command):
                key = (line["groups"], line["world_size"], line["params_per_group"])
                entry = best.setdefault(key, {})
                for field in ("total", "floor"):
                    if field in line:
                        name = who if field == "total" else "floor"
                        entry[name] = min(entry.get(name, float("inf")), line[field])
        progress(repetition, repetitions)
    print("host-overhead, us of CPU per group and step, best of", repetitions)
    print(f"{'groups':>7}{'world':>7}{'params':>8}{'ours':>9}{'FSDP2':>10}{'ratio':>8}{'floor':>8}")
    summary = []
    for (groups, world, params), entry in best.items():
        ratio = entry["peer"] / entry["ours"]
        print(f"{groups:7}{world:7}{params:8}{entry['ours']:9.1f}{entry['peer']:10.1f}"
              f"{ratio:8.1f}{entry['floor']:8.1f}")
        summary.append({"metric": f"groups={groups} world={world} params={params}",
                        "unit": "us of CPU per group", "ours": entry["ours"],
                        "peer": entry["peer"], "ratio": round(ratio, 2), "floor": entry["floor"]})
    return summary


def reference_tests(build):
    """Seconds of each test of class CollectiveOps of the reference suite, by test and layout."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        command = [str(build / "tests" / "reference_test"), "--gtest_brief=1",
                   "--gtest_filter=*/CollectiveOps.*", f"--gtest_output=json:{report}"]
        run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if run.returncode != 0:
            sys.exit(f"compare: {' '.join(command)} ended with {run.returncode}\n{run.stdout}")
        suites = json.loads(report.read_text())["testsuites"]
    tests = [test for suite in suites for test in suite["testsuite"]]
    return {tuple(test["name"].split("/")): float(test["time"].rstrip("s")) for test in tests}


def threads128(build, repetitions):
    """The three tests of the collectives on 128 ranks that are threads; median of wall times."""
    ours, peer = {}, {}
    for repetition in range(repetitions):
        for key, seconds in reference_tests(build).items():
            ours.setdefault(key, []).append(seconds)
        for line in lines([sys.executable, str(HERE / "peer" / "threads128.py")]):
            peer.setdefault(line["test"], []).append(line["seconds"])
        progress(repetition, repetitions)
    print("threads128, s of wall time for a test on 128 ranks, median of", repetitions)
    print(f"{'test':28}{'layout':14}{'ours':>8}{'FSDP2':>9}{'ratio':>8}")
    summary = []
    totals = {}
    for (test, layout), seconds in ours.items():
        totals.setdefault(layout, []).append((seconds, peer[test]))
    rows = [(test, layout, seconds, peer[test]) for (test, layout), seconds in ours.items()]
    for layout, pairs in totals.items():  # of all tests, repetition by repetition
        rows.append(("all three", layout, [sum(s) for s in zip(*(pair[0] for pair in pairs))],
                     [sum(s) for s in zip(*(pair[1] for pair in pairs))]))
    for test, layout, of_ours, of_peer in rows:
        mine, theirs = statistics.median(of_ours), statistics.median(of_peer)
        print(f"{test:28}{layout:14}{mine:8.2f}{theirs:9.2f}{theirs / mine:8.1f}")
        summary.append({"metric": f"{test} {layout}", "unit": "s of wall time", "ours": mine,
                        "peer": theirs, "ratio": round(theirs / mine, 2),
                        "repetitions": repetitions})
    return summary


CASES = {"host-overhead": host_overhead, "threads128": threads128}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--case", choices=CASES, default="host-overhead")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    entries = CASES[options.case](options.build, options.repetitions)
    path = options.build / "bench" / "summary.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    others = json.loads(path.read_text()) if path.exists() else []
    others = [entry for entry in others if entry["case"] != options.case]
    entries = [{"case": options.case, **entry} for entry in entries]
    path.write_text(json.dumps(others + entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
