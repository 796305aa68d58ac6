// AVX-512's vector width and tile in portable code: only built for tests, so that machines without AVX-512 check them.
#define DEEPINFER_ISA wide
#define DEEPINFER_LANES 16
#define DEEPINFER_TILE_ROWS 12
#include "../kernel_table.inc.h"
