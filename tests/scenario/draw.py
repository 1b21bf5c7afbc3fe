"""Draws a scenario (docs/scenario.md) from a seed: its modules, how they are sharded, and what is
done with them. Legal ones as far as that is easy to see; generate.py leaves the others out.
"""
import collections
import random

WIDTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9]
DTYPES = ["bf16", "fp16"]


# --- The modules.


def draw_leaf(rng, width, kinds):
    kind = rng.choice(kinds)
    if kind == "linear":
        out = rng.choice(WIDTHS) if rng.random() < 0.6 else width
        return {"type": "linear", "in": width, "out": out, "bias": rng.random() < 0.7}
    if kind == "mlp":
        return {"type": "mlp", "dim": width, "mult": rng.randint(1, 3)}
    node = {"type": "double", "dim": width}
    passed = rng.choice([None, None, 0, 1])
    return node if passed is None else {**node, "pass": passed}


def draw_children(rng, width, count, draw):
    children = []
    for _ in range(count):
        children.append(draw(rng, width))
        width = width_out(children[-1])
    return children


def draw_sequential(rng, width):
    leaf = lambda rng, width: draw_leaf(rng, width, ["linear", "linear", "mlp"])
    return {"type": "sequential", "children": draw_children(rng, width, rng.randint(1, 4), leaf)}


def draw_child(rng, width, depth):
    kind = rng.random()
    if kind < 0.15 and depth < 2:
        return draw_list(rng, width, depth + 1)
    if kind < 0.3:
        return draw_sequential(rng, width)
    return draw_leaf(rng, width, ["linear", "linear", "mlp", "double"])


def draw_list(rng, width, depth=0):
    count = rng.randint(1, 4 if depth == 0 else 2)
    node = {"type": "list", "children": draw_children(
        rng, width, count, lambda rng, width: draw_child(rng, width, depth))}
    run = list(range(count))
    square = [i for i, child in enumerate(node["children"]) if width_in(child) == width_out(child)]
    if square and rng.random() < 0.3:  # one runs twice, or not at all
        index = rng.choice(square)
        run = [i for j in run for i in ([j, j] if j == index else [j])]
        if count > 1 and rng.random() < 0.4:
            run = [j for j in run if j != index]
    return {**node, "run": run} if run != list(range(count)) else node


def draw_model(rng):
    width = rng.choice(WIDTHS)
    kind = rng.random()
    if kind < 0.3:
        return draw_sequential(rng, width)
    if kind < 0.85:
        return draw_list(rng, width)
    return draw_leaf(rng, width, ["linear", "mlp", "double"])


def order_of(node):
    return node.get("run", list(range(len(node["children"]))))


def width_in(node):
    if node["type"] == "linear":
        return node["in"]
    return node["dim"] if "dim" in node else width_in(node["children"][order_of(node)[0]])


def width_out(node):
    if node["type"] == "linear":
        return node["out"]
    return node["dim"] if "dim" in node else width_out(node["children"][order_of(node)[-1]])


def num_outputs(node):
    if node["type"] == "double":
        return 2
    return num_outputs(node["children"][order_of(node)[-1]]) if node["type"] == "list" else 1


def children_of(node):
    """The names and nodes of a module's children."""
    dim, kind = node.get("dim"), node["type"]
    linear = lambda a, b: {"type": "linear", "in": a, "out": b, "bias": True}
    if kind == "mlp":
        hidden = dim * node["mult"]
        return [("in_proj", linear(dim, hidden)), ("out_proj", linear(hidden, dim))]
    if kind == "double":
        return [("lin1", linear(dim, dim)), ("lin2", linear(dim, dim))]
    prefix = "layers." if kind == "list" else ""
    return [(f"{prefix}{i}", child) for i, child in enumerate(node.get("children", []))]


def modules_of(node, path=""):
    """All that can be sharded, by path, children after their parents."""
    result = {path: node}
    for name, child in children_of(node):
        result.update(modules_of(child, f"{path}.{name}" if path else name))
    return result


def parent_of(path):
    parts = path.split(".")[:-1]
    if parts and parts[-1] == "layers":
        parts.pop()
    return ".".join(parts)


# --- How they are sharded.


def depth_of(path):
    return len(path.split(".")) if path else 0


def draw_policies(rng, calls):
    scheme = rng.random()
    if scheme < 0.5:
        return
    if scheme < 0.6:
        policy = {"reduce": rng.choice(DTYPES)}
    else:
        policy = {"param": rng.choice(DTYPES)}
        if rng.random() < 0.5:
            policy["reduce"] = rng.choice(["fp32", "fp32", *DTYPES])
    mixed = scheme > 0.85  # each module its own: then all return fp32
    for call in calls:
        call["mp"] = dict(policy)
        if mixed:
            call["mp"] = {"output": "fp32"}
            if rng.random() < 0.7:
                call["mp"]["param"] = rng.choice(DTYPES)
            if rng.random() < 0.4:
                call["mp"]["reduce"] = rng.choice(["fp32", *DTYPES])
        elif call["module"] == "" and rng.random() < 0.5:
            call["mp"]["output"] = "fp32"
        elif call["module"] != "" and "param" in policy and rng.random() < 0.3:
            call["mp"]["cast_inputs"] = False


def draw_calls(rng, modules, mesh):
    chosen = [path for path in modules if path and rng.random() < 0.5]
    if rng.random() < 0.92 or not chosen:
        chosen.append("")
    calls = [{"module": path} for path in sorted(chosen, key=depth_of, reverse=True)]
    siblings = collections.defaultdict(list)
    for path in modules:
        if path and path not in chosen:
            siblings[parent_of(path)].append(path)
    lists = [paths for paths in siblings.values() if len(paths) > 1]
    if "" in chosen and lists and rng.random() < 0.5:
        paths = rng.choice(lists)[:3]
        position = sum(depth_of(path) > depth_of(paths[0]) for path in chosen)
        calls.insert(position, {"module": paths})
    choices = [None, None, True, True, False] + ([2] if len(mesh) == 1 else [])
    for call in calls:
        reshard = rng.choice(choices)
        if reshard is not None:
            call["reshard"] = reshard
    draw_policies(rng, calls)
    return calls


def paths_of(call):
    return call["module"] if isinstance(call["module"], list) else [call["module"]]


def call_of(calls, path):
    """The number of the call that shards a module's own parameters."""
    while True:
        for number, call in enumerate(calls):
            if path in paths_of(call):
                return number
        if not path:
            return None
        path = parent_of(path)


def draw_ties(rng, modules, calls):
    groups = collections.defaultdict(list)
    for path, node in modules.items():
        if node["type"] == "linear":
            groups[node["in"], node["out"], call_of(calls, path)].append(path)
    pairs = [paths for paths in groups.values() if len(paths) > 1 and "" not in paths]
    if not pairs or rng.random() < 0.4:
        return []
    paths = rng.choice(pairs)
    return [[f"{paths[0]}.weight", f"{paths[1]}.weight"]]


def parameters_of(modules):
    names = []
    for path, node in modules.items():
        if node["type"] == "linear":
            prefix = f"{path}." if path else ""
            names += [f"{prefix}weight"] + ([f"{prefix}bias"] if node["bias"] else [])
    return names


def draw_frozen(rng, modules):
    if rng.random() < 0.7:
        return []
    return [name for name in parameters_of(modules) if rng.random() < 0.3]


# --- What is done with them.


class Program:
    def __init__(self, rng, scenario, modules):
        self.rng, self.scenario, self.modules = rng, scenario, modules
        self.sharded = [path for call in scenario["shard"] for path in paths_of(call)]
        self.single = [call["module"] for call in scenario["shard"]
                       if not isinstance(call["module"], list)]
        # A sum in bf16 or fp16 is rounded before a division, but by PREMUL_SUM after it.
        rounds = any("mp" in call for call in scenario["shard"])
        self.factors = [0.5, 1.0, 2.0, 4.0] + ([] if rounds else [3.0])
        self.root = "" if "" in self.sharded else self.sharded[-1]
        self.hsdp = len(scenario.get("mesh", [2])) == 2
        self.freed_in_backward = self.first_linear() if rng.random() < 0.3 else None
        self.input_grad = self.freed_in_backward is None and rng.random() < 0.5
        others = [other for _, other in scenario.get("ties", [])]
        self.parameters = [name for name in parameters_of(modules) if name not in others]
        self.operations, self.outputs, self.waiting, self.late = [], [], [], []

    def first_linear(self):
        """A sharded Linear whose backward needs no weight, since it runs first, and once."""
        path, node = "", self.scenario["model"]
        while node["type"] in ("list", "sequential", "mlp"):
            index = order_of(node)[0] if "children" in node else 0
            if "children" in node and order_of(node).count(index) > 1:
                return None
            name, node = children_of(node)[index]
            path = f"{path}.{name}" if path else name
        calls = [call for call in self.scenario["shard"] if call["module"] == path]
        return path if node["type"] == "linear" and calls else None

    def add(self, op, **arguments):
        self.operations.append({"op": op, **arguments})

    def any_module(self):
        return self.rng.choice(self.sharded)

    def forward(self, grad=True):
        rng, path = self.rng, ""
        casts = "mp" in self.scenario["shard"][-1]  # a part alone would get inputs not cast
        if self.outputs and self.freed_in_backward is None and rng.random() < 0.07 and not casts:
            path = rng.choice(self.single)
        node = self.modules[path]
        self.add("forward", module=path, seed=rng.randint(0, 999), rows=rng.randint(1, 4),
                 width=width_in(node), grad=grad,
                 input_grad=grad and self.input_grad and rng.random() < 0.6)
        self.outputs.append(num_outputs(node))
        return len(self.outputs) - 1

    def backward(self, forwards, output=None, retain=False):
        which = {} if output is None else {"output": output}
        self.add("backward", forwards=forwards, retain=retain, **which)

    def backwards(self, forwards):
        rng = self.rng
        if len(forwards) == 1 and self.outputs[forwards[0]] == 2 and rng.random() < 0.7:
            first = rng.randint(0, 1)
            self.backward(forwards, first, retain=True)
            self.between(0.3)
            if rng.random() < 0.8:
                self.backward(forwards, 1 - first)
        elif rng.random() < 0.2:
            self.backward(forwards, retain=True)
            self.between(0.3)
            self.backward(forwards)
        elif len(forwards) > 1 and rng.random() < 0.5:
            for forward in rng.sample(forwards, len(forwards)):
                self.backward([forward])
                self.between(0.3)
        else:
            self.backward(forwards)

    def between(self, probability):
        while self.rng.random() < probability:
            self.rng.choice([self.change, self.change, self.gather, self.free])()

    def gather(self):
        if self.waiting and self.rng.random() < 0.7:
            self.add("wait", handle=self.waiting.pop())
            return
        is_async = self.rng.random() < 0.6
        self.add("unshard", module=self.any_module(), **{"async": is_async})
        if is_async:
            self.waiting.append(sum(op.get("async", False) for op in self.operations) - 1)

    def free(self):
        self.add("reshard", module=self.any_module())

    def change(self):
        rng, path = self.rng, self.any_module()
        name = rng.choice([
            "set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward",
            "set_reshard_after_forward", "set_reshard_after_backward", "set_unshard_in_backward",
            "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch",
            "set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch",
            "set_gradient_divide_factor"])
        if "prefetch" in name:
            others = [other for other in self.sharded if other != path]
            self.add(name, module=path,
                     modules=rng.sample(others, min(len(others), rng.randint(0, 3))))
        elif name == "set_is_last_backward":
            self.add(name, module=self.root, value=rng.random() < 0.5)
        elif name == "set_unshard_in_backward":
            freed = self.freed_in_backward
            self.add(name, module=path if freed is None else freed,
                     value=freed is None or rng.random() < 0.3)
        elif name == "set_gradient_divide_factor":
            if not self.hsdp:  # docs/parity.md: factor with one rank
                self.add(name, module=path, value=rng.choice(self.factors))
        else:
            self.add(name, module=path, value=rng.random() < 0.5, recurse=rng.random() < 0.7)

    def freeze(self):
        """Between steps, while no gradients wait to be reduced: else the library refuses."""
        waits = any(op["op"] in ("set_requires_gradient_sync", "set_requires_all_reduce")
                    for op in self.operations)
        if not self.late and not waits and self.parameters and self.rng.random() < 0.2:
            self.add("set_requires_grad", parameter=self.rng.choice(self.parameters),
                     value=self.rng.random() < 0.5)

    def accumulation(self):
        """What is switched off before the first microbatch and on again before the last."""
        options = [("set_requires_gradient_sync", 0.4), ("set_is_last_backward", 0.4),
                   ("set_reshard_after_backward", 0.4), ("set_requires_all_reduce",
                                                        0.7 if self.hsdp else 0.1)]
        return [name for name, probability in options if self.rng.random() < probability]

    def switch(self, names, value):
        for name in names:
            recurse = {} if name == "set_is_last_backward" else {"recurse": True}
            self.add(name, module=self.root, value=value, **recurse)

    def step(self):
        rng = self.rng
        self.freeze()
        num_microbatches = rng.choice([1, 1, 2, 3])
        names = self.accumulation() if num_microbatches > 1 else []
        for microbatch in range(num_microbatches):
            if microbatch == 0:
                self.switch(names, False)
            if microbatch == num_microbatches - 1:
                self.switch(names, True)
            self.between(0.25)
            if rng.random() < 0.1:
                self.forward(grad=False)
            forwards = [self.forward() for _ in range(rng.choice([1, 1, 1, 2]))]
            self.between(0.2)
            if rng.random() < 0.08:
                self.late += forwards  # their backward comes after a step, or not at all
            else:
                self.backwards(forwards)
        if self.late and rng.random() < 0.5:
            self.backward([self.late.pop()])
        self.between(0.1)
        if rng.random() < 0.9:
            self.add("step")
        if rng.random() < 0.9:
            self.add("zero_grad", to_none=rng.random() < 0.6)


def draw(seed, number):
    rng = random.Random(f"{seed}/{number}")
    scenario = {"seed": rng.randint(0, 9999), "model": draw_model(rng)}
    modules = modules_of(scenario["model"])
    mesh = [2, 1] if rng.random() < 0.15 else [2]
    if len(mesh) == 2:
        scenario["mesh"] = mesh
    scenario["shard"] = draw_calls(rng, modules, mesh)
    for key, value in (("ties", draw_ties(rng, modules, scenario["shard"])),
                       ("frozen", draw_frozen(rng, modules))):
        if value:
            scenario[key] = value
    # Fused AdamW does not take plain parameters beside sharded ones.
    all_sharded = any(call["module"] == "" for call in scenario["shard"])
    scenario["optimizer"] = rng.choice(["sgd", "adamw" if all_sharded else "sgd"])
    program = Program(rng, scenario, modules)
    if program.freed_in_backward is not None:
        program.add("set_unshard_in_backward", module=program.freed_in_backward, value=False)
    program.between(0.3)
    for _ in range(rng.randint(1, 3)):
        program.step()
    scenario["operations"] = program.operations
    return scenario
