#define DEEPINFER_ISA avx512
#define DEEPINFER_LANES 16
#define DEEPINFER_TILE_ROWS 12
#include "../kernel_table.inc.h"
