#include "kernels.h"

namespace slim {
const FormatKernels* kernels_blocks(int format) {
  switch (format) {
    case Q4_0: return kernels_of<LayoutQ4_0>();
    case Q4_1: return kernels_of<LayoutQ4_1>();
    case Q5_0: return kernels_of<LayoutQ5_0>();
    case Q5_1: return kernels_of<LayoutQ5_1>();
    case Q8_0: return kernels_of<LayoutQ8_0>();
    default: return nullptr;
  }
}
}  // namespace slim
