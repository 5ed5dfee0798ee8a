/* One vector add of 2^20 elements in the current context, every element checked against the CPU. */
#ifndef KVMPOOL_SAMPLE_ADD_H
#define KVMPOOL_SAMPLE_ADD_H

#include "driver.h"

#define ADD_ELEMENTS (1 << 20)
#define ADD_BYTES (ADD_ELEMENTS * sizeof(float))
#define ADD_BLOCK 256
#define ADD_WRONG 1000 /* no CUresult: the card computed something else */

/* `host` holds three vectors; `seed` makes each round's numbers its own. */
static inline CUresult add_on_card(CUfunction kernel, float *host, unsigned seed)
{
    float *a = host, *b = host + ADD_ELEMENTS, *sum = host + 2 * ADD_ELEMENTS;
    CUdeviceptr da, db, dsum;
    int n = ADD_ELEMENTS;
    void *parameters[] = {&da, &db, &dsum, &n};

    for (int i = 0; i < n; i++) {
        a[i] = (float)((i + seed) % 1000) * 0.5f;
        b[i] = (float)((i * 7 + seed) % 1003) * 0.25f;
    }
    memset(sum, 0xff, ADD_BYTES);
    TRY(cuMemAlloc(&da, ADD_BYTES));
    TRY(cuMemAlloc(&db, ADD_BYTES));
    TRY(cuMemAlloc(&dsum, ADD_BYTES));
    TRY(cuMemcpyHtoD(da, a, ADD_BYTES));
    TRY(cuMemcpyHtoD(db, b, ADD_BYTES));
    TRY(cuLaunchKernel(kernel, (ADD_ELEMENTS + ADD_BLOCK - 1) / ADD_BLOCK, 1, 1, ADD_BLOCK, 1, 1, 0, NULL, parameters, NULL));
    TRY(cuMemcpyDtoH(sum, dsum, ADD_BYTES));
    TRY(cuMemFree(da));
    TRY(cuMemFree(db));
    TRY(cuMemFree(dsum));
    for (int i = 0; i < n; i++) {
        if (sum[i] != a[i] + b[i]) {
            fprintf(stderr, "element %d: %g + %g is not %g\n", i, a[i], b[i], sum[i]);
            return ADD_WRONG;
        }
    }
    return 0;
}

#endif
