// Kernels of MLX, out of the headers of the mlx-metal wheel; test_fidelity.py adds the instances.
#include <metal_stdlib>
#include "mlx_internals.h"
#include "mlx/backend/metal/kernels/defines.h"
#include "mlx/backend/metal/kernels/utils.h"
#ifdef GATED_DELTA  // both declare a function constant 200
#include "mlx/backend/metal/kernels/gated_delta_update.h"
#else
#include "mlx/backend/metal/kernels/steel/gemm/gemm.h"
#include "mlx/backend/metal/kernels/quantized_utils.h"
#include "mlx/backend/metal/kernels/quantized.h"
#include "mlx/backend/metal/kernels/gemv.h"
#include "mlx/backend/metal/kernels/logsumexp.h"
#include "mlx/backend/metal/kernels/sdpa_vector.h"
#include "mlx/backend/metal/kernels/softmax.h"
#endif
