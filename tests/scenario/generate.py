"""Draws scenarios (docs/scenario.md) from a seed, runs them with PyTorch's FSDP2 and writes both.

    python tests/scenario/generate.py SEED COUNT FILE

A draw that the original refuses, or does not do as docs/parity.md says it should, is left out and
the next one takes its place. Prints how often each option and operation occurs; with 300 or more
it fails if one never does.
"""
import collections
import json
import pathlib
import sys

from draw import draw

EXPECTED = (
    ["linear", "linear without bias", "mlp", "double", "sequential", "list", "run twice",
     "never run", "pass 0", "pass 1", "ties", "frozen", "mesh 2x1", "root not sharded",
     "list of modules", "reshard unset", "reshard true", "reshard false", "reshard 2",
     "param bf16", "param fp16", "reduce fp32", "reduce bf16", "reduce fp16", "output fp32",
     "inputs not cast", "sgd", "adamw", "forward", "forward no_grad", "forward of a part",
     "forward input_grad", "backward", "backward retain", "backward of one output",
     "backward of two forwards", "step", "zero_grad to none", "zero_grad to zero", "unshard",
     "unshard async", "wait", "reshard"] +
    [f"{name} {value}" for name in
     ("set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward",
      "set_reshard_after_forward", "set_reshard_after_backward", "set_unshard_in_backward",
      "set_requires_grad")
     for value in ("true", "false")] +
    ["not recursive", "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch",
     "prefetch of several", "set_gradient_divide_factor"])


def features_of_model(node):
    kind = node["type"]
    yield kind + (" without bias" if node.get("bias") is False else "")
    if "pass" in node:
        yield f"pass {node['pass']}"
    run = node.get("run", [])
    if len(set(run)) < len(run):
        yield "run twice"
    if run and len(set(run)) < len(node["children"]):
        yield "never run"
    for child in node.get("children", []):
        yield from features_of_model(child)


def features_of_call(call):
    reshard = call.get("reshard", "unset")
    yield f"reshard {str(reshard).lower()}"
    if isinstance(call["module"], list):
        yield "list of modules"
    for key, value in call.get("mp", {}).items():
        yield "inputs not cast" if key == "cast_inputs" else f"{key} {value}"


def features_of_operation(op):
    name = op["op"]
    if name == "forward":
        yield "forward" if op["grad"] else "forward no_grad"
        if op["module"]:
            yield "forward of a part"
        if op["input_grad"]:
            yield "forward input_grad"
    elif name == "backward":
        yield "backward retain" if op["retain"] else "backward"
        if "output" in op:
            yield "backward of one output"
        if len(op["forwards"]) > 1:
            yield "backward of two forwards"
    elif name == "zero_grad":
        yield "zero_grad to none" if op["to_none"] else "zero_grad to zero"
    elif name == "unshard":
        yield "unshard async" if op["async"] else "unshard"
    else:
        yield name + (f" {str(op['value']).lower()}" if isinstance(op.get("value"), bool) else "")
    if op.get("recurse") is False:
        yield "not recursive"
    if len(op.get("modules", [])) > 1:
        yield "prefetch of several"


def features(scenario):
    yield from features_of_model(scenario["model"])
    yield from (key for key in ("ties", "frozen") if key in scenario)
    yield scenario["optimizer"]
    if "mesh" in scenario:
        yield "mesh 2x1"
    if all(call["module"] != "" for call in scenario["shard"]):
        yield "root not sharded"
    for call in scenario["shard"]:
        yield from features_of_call(call)
    for op in scenario["operations"]:
        yield from features_of_operation(op)


def generate(seed, count, run):
    """`count` scenarios that the original runs, with what it gave, and why others were left out."""
    scenarios, outputs, dropped, number = [], [], collections.Counter(), 0
    while len(scenarios) < count:
        missing = count - len(scenarios)
        drawn = [draw(seed, number + i) for i in range(missing + missing // 3 + 1)]
        number += len(drawn)
        for scenario, output in zip(drawn, run(drawn)):
            if isinstance(output, dict):
                dropped[output["dropped"].split(" but got")[0][:90]] += 1
            elif len(scenarios) < count:
                scenarios.append(scenario)
                outputs.append(output)
    return scenarios, outputs, dropped


def main():
    seed, count, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sys.path.append(str(pathlib.Path(__file__).parents[2] / "bench" / "peer"))
    from scenario import run
    scenarios, outputs, dropped = generate(seed, count, run)
    occurrences = collections.Counter(f for scenario in scenarios for f in features(scenario))
    for name in EXPECTED:
        print(f"{occurrences[name]:6} {name}")
    for reason, times in dropped.most_common():
        print(f"{times:6} left out: {reason}")
    compact = lambda value: json.dumps(value, separators=(",", ":"))
    pathlib.Path(path).write_text(
        '{"scenarios":[\n' + ",\n".join(map(compact, scenarios)) + '\n],"outputs":[\n' +
        ",\n".join(map(compact, outputs)) + "\n]}\n")
    missing = [name for name in EXPECTED if not occurrences[name]]
    if count >= 300 and missing:
        sys.exit(f"never drawn: {', '.join(missing)}")


if __name__ == "__main__":
    main()
