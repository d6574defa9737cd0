/* cuBLAS and cuBLASLt without matrix products: handles, and one algorithm for every product. build.py generates the
 * functions of products, which compute nothing and return success. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int made(void **handle) { return *handle = calloc(1, 256), 0; }

int cublasCreate_v2(void **handle) { return made(handle); }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }
size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtMatmulDescCreate(void **description, int compute, int scale) { return made(description); }
int cublasLtMatmulPreferenceCreate(void **preference) { return made(preference); }
int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) { return made(layout); }

struct heuristic { uint64_t algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; }; /* cublasLtMatmulHeuristicResult_t */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d, void *preference, int wanted,
                                   struct heuristic *results, int *found) {
    memset(results, 0, sizeof *results);
    return *found = 1, 0;
}
int cublasLtMatmulAlgoCheck(void *handle, void *description, void *a, void *b, void *c, void *d, const void *algorithm, struct heuristic *result) {
    memset(result, 0, sizeof *result);
    return 0;
}
