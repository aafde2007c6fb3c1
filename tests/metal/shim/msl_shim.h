// Stand-in for <metal_stdlib> when stock clang compiles a .metal file as C++ for OpenCL. Address
// spaces are OpenCL's, which clang checks as strictly as Metal does; what clang still lets through
// (a pointer that names no space) is found by lint.py.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunused-function"
#pragma clang diagnostic ignored "-Wunused-parameter"
#include "types.h"
#include "maths.h"
#include "simd.h"
#include "entry.h"
#pragma clang diagnostic pop
