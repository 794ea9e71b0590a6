// The Metal Shading Language library, as far as the kernels under test use it, in C++17 for g++ 12 and clang++.
// Included ahead of a unit from which src/translate took address spaces and attributes.
#pragma once
#include "abi.h"
#include "types.h"
#include "vector.h"
#include "limits.h"
#include "math.h"
#include "simd.h"
#include "matrix.h"
#include "atomic.h"
#include "launch.h"
