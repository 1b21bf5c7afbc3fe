"""Runs a benchmark and its peer in PyTorch's FSDP2 in turns and prints both with their ratio.

    compare.py BUILD [--case all|host-overhead|...] [--repetitions 5]

Ours and the peer's run one after the other in every repetition, since the machine may be shared.
Replaces the case's entries in BUILD/bench/summary.json: {case, metric, unit, ours, peer, ratio, floor,
repetitions, load, versions}. A ratio above 1 says that ours is faster, or smaller. A claim needs five
repetitions or more.
"""
import argparse
import json
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent


def lines(command):
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if run.returncode != 0:
        sys.exit(f"compare: {' '.join(command)} ended with {run.returncode}")
    return json_of(run.stdout)


def json_of(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def two_processes(commands, preload=None, joined=True):
    """Runs two at the same time, as the ranks of a job if they are to be joined; what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    runs = []
    for rank, command in enumerate(commands):
        env = dict(os.environ)
        if joined:
            env.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                       MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        if preload:
            env["LD_PRELOAD"] = str(preload)
        runs.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    printed = [line for run in runs for line in json_of(run.communicate()[0])]
    for run, command in zip(runs, commands):
        if run.returncode != 0:
            sys.exit(f"compare: {' '.join(command)} ended with {run.returncode}")
    return printed


def progress(repetition, repetitions):
    print(f"repetition {repetition + 1} of {repetitions}, load {os.getloadavg()[0]:.1f}",
          file=sys.stderr)


def host_overhead(build, repetitions):
    """Host time of a group and step: the median of ours and of the floor, the smallest of the peer's."""
    commands = {"ours": [str(build / "bench" / "host_overhead_bench"), "30"],
                "peer": [sys.executable, str(HERE / "peer" / "host_overhead.py"), "2"]}
    found = {}
    for repetition in range(repetitions):
        for who, command in commands.items():
            for line in lines(command):
                key = (line["groups"], line["world_size"], line["params_per_group"])
                entry = found.setdefault(key, {"ours": [], "peer": [], "floor": []})
                entry[who].append(line["total"])
                if who == "ours":
                    entry["floor"].append(line["floor"])
        progress(repetition, repetitions)
    best = {key: {"ours": statistics.median(entry["ours"]), "peer": min(entry["peer"]),
                  "floor": statistics.median(entry["floor"])} for key, entry in found.items()}
    print("host-overhead, us of CPU per group and step, of", repetitions)
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
                        "peer": theirs, "ratio": round(theirs / mine, 2), "floor": None})
    return summary


def collectives(build, repetitions):
    """Between two ranks: ours are threads, the peer's processes over Gloo. Then what a group's gather
    and reduction keep of the speed of memory, which has a floor and no peer."""
    ours, floors, peer, units = {}, {}, {}, {}
    script = [sys.executable, str(HERE / "peer" / "collectives.py")]
    for repetition in range(repetitions):
        for line in lines([str(build / "bench" / "collectives_bench")]):
            ours.setdefault(line["metric"], []).append(line["value"])
            floors.setdefault(line["metric"], []).append(line["floor"])
            units[line["metric"]] = line["unit"]
        for line in two_processes([script, script]):
            peer.setdefault(line["metric"], []).append(line["value"])
        progress(repetition, repetitions)
    print(f"collectives, median of {repetitions}; floor: memcpy of the same bytes by one thread, or "
          "of the reduction what it reads and writes")
    print(f"{'':46}{'unit':>6}{'ours':>12}{'Gloo':>12}{'ratio':>8}{'floor':>10}")
    summary = []
    for metric, values in ours.items():
        mine, floor = statistics.median(values), statistics.median(floors[metric])
        theirs = statistics.median(peer[metric]) if metric in peer else None
        ratio = theirs / mine if theirs else None
        print(f"{metric:46}{units[metric]:>6}{mine:12.1f}{theirs or 0:12.1f}{ratio or 0:8.1f}"
              f"{floor:10.1f}")
        summary.append({"metric": metric, "unit": units[metric], "ours": mine, "peer": theirs,
                        "ratio": ratio and round(ratio, 2), "floor": floor})
    return summary


def transformer(size, dtypes, steps):
    """Whole training steps of a decoder on two ranks: over Gloo as the peer, and as threads. Floor:
    two processes that train unsharded at the same time."""
    def run(build, repetitions):
        bench = str(build / "bench" / "transformer_bench")
        script = [sys.executable, str(HERE / "peer" / "transformer.py")]
        print(f"transformer-{size}, ms of wall time for a step, median of {repetitions}")
        print(f"{'':28}{'ours':>10}{'FSDP2':>10}{'ratio':>8}{'floor':>10}{'to floor':>10}")
        summary = []
        for dtype in dtypes:
            found = {"processes": [], "threads": [], "alone": [], "peer": []}
            for repetition in range(repetitions):
                command = [bench, size, "processes", dtype, str(steps)]
                results = {"processes": two_processes([command, command]),
                           "threads": lines([bench, size, "threads", dtype, str(steps)])}
                command = [bench, size, "alone", dtype, str(steps)]
                results["alone"] = two_processes([command, command], joined=False)
                command = script + [size, dtype, str(steps)]
                results["peer"] = two_processes([command, command])
                check_losses(results["processes"][0], results["peer"][0], dtype)
                check_losses(results["threads"][0], results["peer"][0], dtype)
                for key, values in results.items():
                    found[key].append(statistics.mean(value["step_ms"] for value in values))
                progress(repetition, repetitions)
            median = {key: statistics.median(values) for key, values in found.items()}
            for ranks, name in (("processes", "Gloo"), ("threads", "threads")):
                ratio = median["peer"] / median[ranks]
                print(f"{dtype + ', ' + name:28}{median[ranks]:10.1f}{median['peer']:10.1f}"
                      f"{ratio:8.2f}{median['alone']:10.1f}"
                      f"{median[ranks] / median['alone']:10.2f}")
                summary.append({"metric": f"{dtype}, ranks over {name}", "unit": "ms of wall time",
                                "ours": median[ranks], "peer": median["peer"],
                                "ratio": round(ratio, 2), "floor": median["alone"]})
        return summary
    return run


def check_losses(ours, peer, dtype):
    """Both trained the same: same parameters, same losses."""
    tolerance = 1e-4 if dtype == "float32" else 5e-2
    same = ours["params"] == peer["params"] and all(
        abs(a - b) <= tolerance * abs(b) for a, b in zip(ours["losses"], peer["losses"]))
    if not same:
        sys.exit(f"compare: ours and the peer did not train the same: {ours} and {peer}")


def memory(build, repetitions):
    """Peak of the heap of rank 0 above what it was before the model, by the malloc tracker."""
    tracker = (build / "bench" / "libmalloc_tracker.so").resolve()
    bench = str(build / "bench" / "transformer_bench")
    script = [sys.executable, str(HERE / "peer" / "transformer.py")]
    found = {"processes": [], "threads": [], "peer": []}
    for repetition in range(repetitions):
        command = [bench, "large", "processes", "float32", "2"]
        found["processes"].append(two_processes([command, command], tracker)[0]["peak_mib"])
        command = ["env", f"LD_PRELOAD={tracker}", bench, "large", "threads", "float32", "2"]
        found["threads"].append(lines(command)[0]["peak_mib"] / 2)
        command = script + ["large", "float32", "2"]
        found["peer"].append(two_processes([command, command], tracker)[0]["peak_mib"])
        progress(repetition, repetitions)
    peer = statistics.median(found["peer"])
    print(f"memory, MiB of heap at the peak, of one rank, median of {repetitions}")
    print(f"{'':28}{'ours':>10}{'FSDP2':>10}{'ratio':>8}")
    summary = []
    for ranks, name in (("processes", "over Gloo"), ("threads", "as threads, half of both")):
        mine = statistics.median(found[ranks])
        print(f"{name:28}{mine:10.1f}{peer:10.1f}{peer / mine:8.2f}")
        summary.append({"metric": f"peak, ranks {name}", "unit": "MiB", "ours": mine, "peer": peer,
                        "ratio": round(peer / mine, 2), "floor": None})
    return summary


CASES = {"host-overhead": host_overhead, "collectives": collectives,
         "transformer-small": transformer("small", ("float32", "bfloat16"), 10),
         "transformer-large": transformer("large", ("float32",), 3), "memory": memory,
         "threads128": threads128}


def versions(build):
    def output(*command):
        return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.strip()
    import torch
    cpu = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line]
    compiler = next((line.split("=")[1].strip() for line in open(build / "CMakeCache.txt")
                     if line.startswith("CMAKE_CXX_COMPILER:")), "unknown")
    return {"libfsdp": output("git", "-C", str(HERE), "describe", "--always", "--dirty"),
            "torch": torch.__version__, "python": platform.python_version(),
            "compiler": compiler, "cpu": f"{cpu[0] if cpu else platform.machine()}, "
                                         f"{os.cpu_count()} cores"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--case", choices=["all", *CASES], default="all")
    parser.add_argument("--repetitions", type=int, default=5)
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    path = options.build / "bench" / "summary.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for case in CASES if options.case == "all" else [options.case]:
        entries = CASES[case](options.build, options.repetitions)
        others = json.loads(path.read_text()) if path.exists() else []
        others = [entry for entry in others if entry["case"] != case]
        common = {"load": os.getloadavg()[0], "versions": versions(options.build)}
        entries = [{"case": case, "repetitions": options.repetitions, **entry, **common}
                   for entry in entries]
        path.write_text(json.dumps(others + entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
