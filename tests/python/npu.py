"""The simulated accelerator as a device of PyTorch: `import npu` gives torch.npu and device "npu".

The environment variable FSDP_SIM_MODULE names the built extension module's file.
"""

import contextlib
import importlib.util
import os
import sys
import types

import torch

NUM_DEVICES = 8


def _load_extension():
    path = os.environ.get("FSDP_SIM_MODULE")
    if not path:
        raise ImportError("FSDP_SIM_MODULE must name the file of fsdp_sim_module")
    spec = importlib.util.spec_from_file_location("fsdp_sim_module", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["fsdp_sim_module"] = module
    return module


sim = _load_extension()


def _index(device=None):
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _Stream:
    """What torch.npu.stream() returns. May be entered again while it is entered."""

    def __init__(self, stream):
        self._stream = stream
        self._before = []

    def __enter__(self):
        if self._stream is None:
            return
        device = torch.accelerator.current_device_index()
        on_device = torch.accelerator.current_stream(self._stream.device)
        self._before.append((device, on_device))
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *error):
        if self._stream is None:
            return
        device, on_device = self._before.pop()
        torch.accelerator.set_stream(on_device)
        torch.accelerator.set_device_index(device)


class _Device(contextlib.AbstractContextManager):
    def __init__(self, device):
        self._index = _index(device)

    def __enter__(self):
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *error):
        torch.accelerator.set_device_index(self._before)


def _make_module():
    module = types.ModuleType("torch.npu")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: NUM_DEVICES
    module.set_device = lambda device: torch.accelerator.set_device_index(_index(device))
    module.current_device = torch.accelerator.current_device_index
    module.device = _Device
    module.current_stream = lambda device=None: torch.accelerator.current_stream(
        torch.device("npu", _index(device))
    )
    module.default_stream = lambda device=None: torch.Stream(
        stream_id=0, device_index=_index(device), device_type=_device_type
    )
    module.set_stream = torch.accelerator.set_stream
    module.stream = _Stream
    module.Stream = lambda device=None, priority=0: torch.Stream(
        torch.device("npu", _index(device)), priority=priority
    )
    module.Event = lambda **options: torch.Event("npu", **options)
    module.synchronize = lambda device=None: sim.synchronize(_index(device))
    module.empty_cache = sim.empty_cache
    module.memory_allocated = lambda device=None: sim.memory_stats(_index(device)).allocated
    module.max_memory_allocated = lambda device=None: sim.memory_stats(
        _index(device)
    ).peak_allocated
    module.memory_reserved = lambda device=None: sim.memory_stats(_index(device)).reserved
    module.reset_peak_memory_stats = lambda device=None: sim.reset_peak_memory_stats(_index(device))

    module.get_rng_state = lambda device=None: sim.default_generator(_index(device)).get_state()
    module.set_rng_state = lambda state, device=None: sim.default_generator(
        _index(device)
    ).set_state(state)
    module.manual_seed = lambda seed: sim.default_generator(_index()).manual_seed(seed)
    module.initial_seed = lambda: sim.default_generator(_index()).initial_seed()

    def manual_seed_all(seed):
        for i in range(NUM_DEVICES):
            sim.default_generator(i).manual_seed(seed)

    module.manual_seed_all = manual_seed_all
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


sim.enable(NUM_DEVICES)
torch.utils.rename_privateuse1_backend("npu")
_device_type = torch.Stream(torch.device("npu", 0)).device_type
torch._register_device_module("npu", _make_module())
torch.utils.generate_methods_for_privateuse1_backend(unsupported_dtype=[])
