#include "kernels.h"

namespace slim {
const FormatKernels* kernels_tables(int format) {
  switch (format) {
    case IQ4_NL: return kernels_of<LayoutIQ4_NL>();
    case IQ4_XS: return kernels_of<LayoutIQ4_XS>();
    case MXFP4: return kernels_of<LayoutMXFP4>();
    case NVFP4: return kernels_of<LayoutNVFP4>();
    case E2M1_G16: return kernels_of<LayoutE2M1_G16>();
    case INT4: return kernels_of<LayoutInt4>();
    default: return nullptr;
  }
}
}  // namespace slim
