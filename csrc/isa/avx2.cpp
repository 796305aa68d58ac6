#define DEEPINFER_ISA avx2
#define DEEPINFER_LANES 8
#define DEEPINFER_TILE_ROWS 6
#include "../kernel_table.inc.h"
