#pragma once

#include <cstddef>

#include "schedule/fsdp_param_group.h"

namespace fsdp {

/// Gathers the group whose forward came before that of `group`, whose backward has just begun.
///
/// Takes the latest place of `group` in the post-forward order; without one (a second backward),
/// or with the first place, there is nothing to gather.
/// Source: PyTorch 2.13, FSDPParamGroup._backward_prefetch.
void backward_prefetch(FSDPParamGroup& group);

}  // namespace fsdp
