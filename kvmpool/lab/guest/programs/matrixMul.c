/* matrixMul: a 256x256 matrix product with shared memory and barriers; exit 0 only where it equals the CPU's. */
#include "driver.h"

#define WIDTH 256
#define TILE 16
#define BYTES ((size_t)WIDTH * WIDTH * sizeof(float))

/* Small whole numbers: sums stay exact in float, so that equal means equal. */
static void fill(float *a, float *b)
{
    for (int i = 0; i < WIDTH * WIDTH; i++) {
        a[i] = (float)(i * 13 % 17 - 8);
        b[i] = (float)(i * 7 % 19 - 9);
    }
}

static int count_wrong(const float *a, const float *b, const float *product)
{
    int wrong = 0;

    for (int row = 0; row < WIDTH; row++) {
        for (int column = 0; column < WIDTH; column++) {
            float sum = 0.0f;
            for (int k = 0; k < WIDTH; k++)
                sum += a[row * WIDTH + k] * b[k * WIDTH + column];
            wrong += product[row * WIDTH + column] != sum;
        }
    }
    return wrong;
}

static CUresult multiply(CUfunction kernel, const float *a, const float *b, float *product)
{
    CUdeviceptr da, db, dproduct;
    CUstream stream;
    CUevent begin, end;
    int width = WIDTH;
    float milliseconds;
    void *parameters[] = {&da, &db, &dproduct, &width};

    TRY(cuStreamCreate(&stream, 1));
    TRY(cuEventCreate(&begin, 0));
    TRY(cuEventCreate(&end, 0));
    TRY(cuMemAlloc(&da, BYTES));
    TRY(cuMemAlloc(&db, BYTES));
    TRY(cuMemAlloc(&dproduct, BYTES));
    TRY(cuMemsetD32Async(dproduct, 0, WIDTH * WIDTH, stream));
    TRY(cuMemcpyHtoDAsync(da, a, BYTES, stream));
    TRY(cuMemcpyHtoDAsync(db, b, BYTES, stream));
    TRY(cuEventRecord(begin, stream));
    TRY(cuLaunchKernel(kernel, WIDTH / TILE, WIDTH / TILE, 1, TILE, TILE, 1, 0, stream, parameters, NULL));
    TRY(cuEventRecord(end, stream));
    TRY(cuMemcpyDtoHAsync(product, dproduct, BYTES, stream));
    TRY(cuStreamSynchronize(stream));
    TRY(cuEventSynchronize(end));
    TRY(cuEventElapsedTime(&milliseconds, begin, end));
    printf("kernel time: %.3f ms\n", milliseconds);
    TRY(cuMemFree(da));
    TRY(cuMemFree(db));
    TRY(cuMemFree(dproduct));
    TRY(cuEventDestroy(begin));
    TRY(cuEventDestroy(end));
    TRY(cuStreamDestroy(stream));
    return 0;
}

static int run(const char *program)
{
    float *a = malloc(BYTES), *b = malloc(BYTES), *product = malloc(BYTES);
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction kernel;
    int wrong;

    if (a == NULL || b == NULL || product == NULL)
        return 2;
    fill(a, b);
    TRY(cuInit(0));
    TRY(cuDeviceGet(&device, 0));
    TRY(cuCtxCreate(&context, 0, device));
    if (load_kernels(program, &module) != 0)
        return 1;
    TRY(cuModuleGetFunction(&kernel, module, "matrix_multiply"));
    TRY(multiply(kernel, a, b, product));
    TRY(cuCtxDestroy(context));
    if ((wrong = count_wrong(a, b, product)) != 0)
        fprintf(stderr, "%d of %d elements differ from the CPU's\n", wrong, WIDTH * WIDTH);
    free(a);
    free(b);
    free(product);
    return wrong != 0;
}

int main(int argc, char **argv)
{
    (void)argc;
    load_driver();
    if (run(argv[0]) != 0) {
        puts("matrixMul: FAIL");
        return 1;
    }
    printf("matrixMul: PASS (%dx%d equals the CPU's)\n", WIDTH, WIDTH);
    return 0;
}
