#pragma once

#include "fsdp/activation.h"      // IWYU pragma: export
#include "fsdp/adamw.h"           // IWYU pragma: export
#include "fsdp/comm_debug.h"      // IWYU pragma: export
#include "fsdp/device_mesh.h"     // IWYU pragma: export
#include "fsdp/error.h"           // IWYU pragma: export
#include "fsdp/events.h"          // IWYU pragma: export
#include "fsdp/fsdp_module.h"     // IWYU pragma: export
#include "fsdp/fully_shard.h"     // IWYU pragma: export
#include "fsdp/module.h"          // IWYU pragma: export
#include "fsdp/nn.h"              // IWYU pragma: export
#include "fsdp/optim.h"           // IWYU pragma: export
#include "fsdp/policy.h"          // IWYU pragma: export
#include "fsdp/process_group.h"   // IWYU pragma: export
#include "fsdp/replicate.h"       // IWYU pragma: export
#include "fsdp/sharded_tensor.h"  // IWYU pragma: export
