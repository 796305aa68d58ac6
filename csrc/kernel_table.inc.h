// Builds one instruction set's kernels and their table. An isa/*.cpp file defines DEEPINFER_ISA (namespace), DEEPINFER_
// LANES (floats per vector) and DEEPINFER_TILE_ROWS (rows of a register tile), then includes this file, nothing else.
#include <cstdint>
// What has no portable spelling (half conversion, byte look-up, byte multiply-add) is written for these two widths. A
// compiler flag from outside may offer more than a file asks for, so the width decides.
#if (defined(__AVX2__) && DEEPINFER_LANES == 8) || (defined(__AVX512BW__) && DEEPINFER_LANES == 16)
  #define DEEPINFER_BYTE_INTRINSICS
  #include <immintrin.h>
#endif

#include "kernels.h"

namespace deepinfer {
namespace DEEPINFER_ISA {
namespace {  // internal linkage: nothing of this instruction set can be picked up by another object

#include "simd.h"
// after simd.h
#include "minifloat.h"
// after minifloat.h
#include "matmul_tile.h"
// after matmul_tile.h
#include "flash_mla_decode_kernel.h"
// after flash_mla_decode_kernel.h
#include "paged_mqa_logits_kernel.h"
// after paged_mqa_logits_kernel.h
#include "paged_mqa_logits_integer_kernel.h"
// any order
#include "softmax_pool_kernel.h"

}  // namespace

#define DEEPINFER_TEXT(x) #x
#define DEEPINFER_NAME(x) DEEPINFER_TEXT(x)
extern const KernelTable table;
const KernelTable table = {DEEPINFER_NAME(DEEPINFER_ISA),
                           pack_query,
                           decode_scratch_floats,
                           decode_split,
                           merge,
                           finish,
                           head_groups,
                           logits_query_floats,
                           integer_query,
                           integer_keys,
                           {pack_logits_query, decode_logits_keys, logits},
                           kIntegerLogits,
                           pool};

}  // namespace DEEPINFER_ISA
}  // namespace deepinfer
