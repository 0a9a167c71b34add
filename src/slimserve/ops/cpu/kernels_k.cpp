#include "kernels.h"

namespace slim {
const FormatKernels* kernels_k(int format) {
  switch (format) {
    case Q2_K: return kernels_of<LayoutQ2_K>();
    case Q3_K: return kernels_of<LayoutQ3_K>();
    case Q4_K: return kernels_of<LayoutQ4_K>();
    case Q5_K: return kernels_of<LayoutQ5_K>();
    case Q6_K: return kernels_of<LayoutQ6_K>();
    default: return nullptr;
  }
}
}  // namespace slim
