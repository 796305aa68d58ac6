#define DEEPINFER_ISA generic
#define DEEPINFER_LANES 4
#define DEEPINFER_TILE_ROWS 6
#include "../kernel_table.inc.h"
